"""Published values of methods: TRL 1.16 and a computation on single sequences, for a small model.

They lie among the assets; a test that asks for them is skipped without.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from preference import SEED, SIZE, fields_of, written

from finetune.data.rows.order import rows_of_step

MODEL = "models/stories260K"
SETTINGS = {
    "dpo": ("loss_type", "beta", "label_smoothing"),
    "orpo": ("beta",),
    "simpo": ("beta", "gamma"),
    "cpo": ("beta",),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
}
"""Fields of a method's recipe that a published run sets."""


def stored(assets: Path, file: str) -> dict[str, Any]:
    path = assets / "oracles" / f"{file}.json"
    if not path.is_file():
        pytest.skip("no published values among the assets")
    return json.loads(path.read_text())


def run_of_file(assets: Path, file: str, name: str) -> dict[str, Any]:
    """A published run, up to the step that begins where the first one ended."""
    run = stored(assets, file)["runs"][name]
    return run | {"steps": run["steps"][:2]}


def texts(assets: Path) -> dict[str, dict[str, Any]]:
    """Rows of pairs by their numbers."""
    return {each["row"]: each for each in stored(assets, "pairs")["rows"]}


def placed(wanted: list[Any]) -> list[Any]:
    """Rows of a file from which training takes its steps in the order that is wanted."""
    order = rows_of_step(0, len(wanted), len(wanted), SEED).tolist()
    return [each for _, each in sorted(zip(order, wanted, strict=True), key=lambda pair: pair[0])]


def recipe_of(
    assets: Path, method: str, source: Path, kind: str, run: dict[str, Any], **sections: Any
) -> dict[str, Any]:
    model = {"name": str(assets / MODEL), "chat_template": str(assets / "oracles/template.jinja")}
    batch = {"rows": SIZE, "micro_rows": 4, "max_length": 512}
    given = fields_of(method, assets / MODEL, source, kind, model=model, batch=batch)
    given["optim"]["lr"] = run["lr"]
    return given | {"max_steps": len(run["steps"])} | sections


def published(
    assets: Path, folder: Path, file: str, name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recipe that trains on the rows of the published steps in their order, and the run."""
    run, rows = run_of_file(assets, file, name), stored(assets, file).get("rows")
    of_row = {each["row"]: each for each in rows} if rows else texts(assets)
    columns = ("prompt", "chosen", "rejected", "completion", "label")
    rows = (of_row[row] for row in placed([row for step in run["steps"] for row in step["rows"]]))
    kept = ({name: row[name] for name in columns if name in row} for row in rows)
    method = name.split("_")[0] if file == "orpo_simpo_cpo" else file
    settings = {key: value for key, value in run["config"].items() if key in SETTINGS[method]}
    if settings.get("loss_type") == "conservative":
        settings["loss_type"] = "sigmoid"
    if "reference" in run:
        settings["reference"] = run["reference"]
    kind = "kto" if method == "kto" else "preference"
    given = recipe_of(assets, method, written(folder / "rows.jsonl", kept), kind, run, **settings)
    if run["policy"] != "full":
        given["model"]["adapter"] = str(assets / "oracles/adapter")
        given["adapter"] = {"r": 4, "alpha": 8}
    return given, run
