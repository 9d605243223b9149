"""Published values of methods: TRL 1.16 and a computation on single sequences, for a small model.

They lie among the assets; a test that asks for them is skipped without.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.order import rows_of_step

SEED = 0
SETTINGS = {
    "dpo": ("loss_type", "beta", "label_smoothing"),
    "orpo": ("beta",),
    "simpo": ("beta", "gamma"),
    "cpo": ("beta",),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
}
"""Fields of a method's recipe that a published run sets."""


def published(
    assets: Path, folder: Path, file: str, name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recipe that trains on the rows of the published steps in their order, and the run."""
    oracles = assets / "oracles"
    if not oracles.is_dir():
        pytest.skip("no published values among the assets")
    found = json.loads((oracles / f"{file}.json").read_text())
    run = found["runs"][name]
    rows = found.get("rows") or json.loads((oracles / "pairs.json").read_text())["rows"]
    of_row = {each["row"]: each for each in rows}
    wanted = [row for step in run["steps"] for row in step["rows"]]
    order = rows_of_step(0, len(wanted), len(wanted), SEED)
    placed = [of_row[row] for _, row in sorted(zip(order.tolist(), wanted, strict=True))]
    columns = ("prompt", "chosen", "rejected", "completion", "label")
    data = folder / "rows.jsonl"
    data.write_text(
        "".join(
            json.dumps({name: row[name] for name in columns if name in row}) + "\n"
            for row in placed
        )
    )
    method = name.split("_")[0] if file == "orpo_simpo_cpo" else file
    settings = {key: value for key, value in run["config"].items() if key in SETTINGS[method]}
    if settings.get("loss_type") == "conservative":
        settings["loss_type"] = "sigmoid"
    given: dict[str, Any] = {
        "method": method,
        "model": {
            "name": str(assets / "models/stories260K"),
            "chat_template": str(oracles / "template.jinja"),
        },
        "data": [{"source": str(data), "format": "kto" if method == "kto" else "preference"}],
        "batch": {"rows": 8, "micro_rows": 4, "max_length": 512},
        "optim": {"lr": run["lr"], "warmup": 0, "schedule": "constant", "max_grad_norm": None},
        "max_steps": len(run["steps"]),
        "seed": SEED,
        **settings,
    }
    if "reference" in run:
        given["reference"] = run["reference"]
    if run["policy"] != "full":
        given["model"]["adapter"] = str(oracles / "adapter")
        given["adapter"] = {"r": 4, "alpha": 8}
    return given, run
