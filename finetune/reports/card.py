"""Write the model card: base, data, training, results, and what was not checked.

Every statement comes from the run's record or from the folder that the card describes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from finetune.planner.shapes.config_files import config_paths
from finetune.planner.shapes.prequantised import stored_kind
from finetune.reports.tables import cell, rendered
from finetune.runs import units
from finetune.runs.environment import public
from finetune.runs.metrics import History, read_history
from finetune.runs.run import Run, of_record, read_object, write_whole
from finetune.runs.summary import (
    base_model,
    exact_answers,
    hub_name,
    read_samples,
    technique,
    title,
)

Kind = Literal["adapter", "merged", "model", "nf4", "gguf"]

Row = tuple[str, str]

TERMS = {"pairs": "pair", "answers": "answer", "rows": "row"}
"""What the loss is a mean over, by the unit of a run; for other units, trained tokens."""


def write_card(
    run: Run,
    folder: Path,
    *,
    kind: Kind | None = None,
    step: int | None = None,
    serve: Sequence[str] = (),
    checked: Sequence[str] = (),
) -> Path:
    """Write `README.md` into a folder with weights of a run; returns its path.

    Args:
        kind: what the folder contains; by default an adapter if the recipe has one, otherwise a
            complete model.
        step: the checkpoint of the weights; by default the best evaluation's or the newest.
        serve: shell commands to run in the folder.
        checked: lines of Markdown about the check of the export.
    """
    recipe, history = read_object(run.recipe), read_history(run)
    kind = kind or ("adapter" if recipe.get("adapter") else "model")
    scores = is_scorer(read_object(folder / "config.json"))
    count = (recipe.get("saving") or {}).get("average", 1) if step is None else 1
    averaged = ", ".join(f"{each:,}" for each in run.steps()[-count:]) if count > 1 else ""
    step = step or run.best_step() or run.newest() or history.step
    with of_record(run.root):
        text = rendered(
            "card.md.jinja",
            front=yaml.safe_dump(
                front_matter(recipe, kind, history, scores), sort_keys=False, allow_unicode=True
            ),
            scores=scores,
            title=plain(title(recipe)),
            base=code(base_model(recipe)),
            kind=kind,
            technique=technique(recipe),
            quantization=plain(str((recipe.get("model") or {}).get("quantization", "none"))),
            stored=_stored_kind(recipe.get("model") or {}),
            step=f"{step:,}",
            averaged=averaged,
            best=history.best is not None and history.best.step == step,
            training=[row(*pair) for pair in _training(recipe, history)],
            data=[row(*cells) for cells in _data(run)],
            sources=[row(*cells) for cells in _sources(recipe)],
            losses=[row(*cells) for cells in _losses(history)],
            term=TERMS.get(history.starts[-1].unit if history.starts else "", "trained token"),
            evaluated=bool(history.evaluated),
            answers=exact_answers(read_samples(run)),
            software=[row(*pair) for pair in _software(read_object(run.environment))],
            code=_loading(recipe, kind, folder),
            stops=_stops(folder),
            serve=serve,
            checked=checked,
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    write_whole(path, text)
    return path


def front_matter(
    recipe: Mapping[str, Any], kind: Kind, history: History | None = None, scores: bool = False
) -> dict[str, Any]:
    """The card's metadata for the hub; names that are not on the hub are left out."""
    model, adapter = recipe.get("model") or {}, recipe.get("adapter")
    base = hub_name(model.get("name"))
    quantized = model.get("quantization", "none") != "none"
    lora = ["qlora" if quantized else "lora"] if adapter else []
    front: dict[str, Any] = {}
    if base:
        front["base_model"] = base
        relations = {"adapter": "adapter", "nf4": "quantized", "gguf": "quantized"}
        front["base_model_relation"] = relations.get(kind, "finetune")
    licence = _licence(model)
    if licence:
        front["license"] = licence
    libraries = {"adapter": "peft", "gguf": "llama.cpp"}
    front["library_name"] = libraries.get(kind, "transformers")
    front["pipeline_tag"] = "text-classification" if scores else "text-generation"
    method = str(recipe.get("method") or "").rpartition(":")[2].lower()
    front["tags"] = ["finetune", *filter(None, [method]), *lora]
    datasets = [hub_name(source.get("source")) for source in recipe.get("data", ())]
    if any(datasets):
        front["datasets"] = list(dict.fromkeys(filter(None, datasets)))
    if history is not None and history.best is not None:
        front["model-index"] = [_result(title(recipe), history.best.loss)]
    return front


def _result(name: str, loss: float) -> dict[str, Any]:
    """The best evaluation as an entry of the hub's `model-index`."""
    metric = {"type": "loss", "name": "mean loss per trained token", "value": round(loss, 4)}
    about = {
        "task": {"type": "text-generation"},
        "dataset": {"type": "held-out", "name": "held-out rows"},
    }
    return {"name": name, "results": [{**about, "metrics": [metric]}]}


def _licence(model: Mapping[str, Any]) -> str | None:
    """The license in the base's own card; None if the card is not on this machine."""
    name = model.get("name")
    for path in config_paths(name, model.get("revision")) if name else ():
        card = path.parent / "README.md"
        if card.is_file():
            text = card.read_text(encoding="utf-8", errors="replace")
            head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
            found = re.search(r"^license:\s*(\S+)\s*$", head[1], re.MULTILINE) if head else None
            return found[1] if found else None
    return None


def _training(recipe: Mapping[str, Any], history: History) -> list[Row]:
    rows: list[Row] = []
    if history.starts:
        start = history.starts[-1]
        share = units.share(start.trainable_parameters, start.parameters)
        batch = f"{start.rows_per_step} = {start.shares} x {start.processes} processes"
        rows += [
            (
                "Trained parameters",
                f"{start.trainable_parameters:,} of {start.parameters:,} ({share})",
            ),
            ("Optimizer steps", f"{history.step:,} of {start.steps:,}"),
            ("Packs a step" if start.packing else "Rows a step", batch),
            *([("Layout of a micro-batch", plain(start.padding))] if start.padding else []),
            ("Backend and precision", plain(f"{start.backend}, {start.precision}")),
            ("Wall time", units.duration(history.seconds)),
            ("Peak memory of one process", units.size(history.peak_memory)),
        ]
    batch_fields = recipe.get("batch") or {}
    if "max_length" in batch_fields:
        rows.append(("Longest row, tokens", cell(batch_fields["max_length"])))
    for section in ("optim", "adapter"):
        for name, value in (recipe.get(section) or {}).items():
            if value not in (None, [], {}, ""):
                rows.append((plain(f"{section}.{name}"), code(_written(public(value)))))
    model = recipe.get("model") or {}
    for name, value in (model.get("chat_template_kwargs") or {}).items():
        rows.append(("Chat template", code(f"{name}={_written(public(value))}")))
    if model.get("adapter"):
        rows.append(("Trained further from", code(public(str(model["adapter"])))))
    if "seed" in recipe:
        rows.append(("Seed", cell(recipe["seed"])))
    return rows


_COUNTS = (
    "rows", "documents", "tokens", "trained_tokens", "dropped", "left_out", "truncated", "split",
    "duplicates",
)  # fmt: skip


def _data(run: Run) -> Iterator[tuple[str, str, str]]:
    """(name, training, held out): counts of the data preparation."""
    counted = read_object(run.data)
    train, held_out = counted.get("train", {}), counted.get("eval", {})
    for name in _COUNTS:
        if name in train:
            yield name.replace("_", " "), cell(train[name]), cell(held_out.get(name))


def _sources(recipe: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(source, format, use) of each data source of the recipe."""
    return [
        (code(public(str(data.get("source")))), code(str(data.get("format"))), use)
        for name, use in (("data", "training"), ("eval_data", "held out"))
        for data in recipe.get(name, ())
    ]


def _losses(history: History) -> list[tuple[str, str, str]]:
    """(name, step, loss): first and last of both curves, the best evaluation, other metrics."""
    trained, evaluated = history.trained, history.evaluated
    rows: list[tuple[str, int, float]] = []
    if trained:
        rows.append(("training, first step", trained[0].step, trained[0].loss))
        rows.append(("training, last step", trained[-1].step, trained[-1].loss))
    if evaluated:
        rows.append(("held-out rows, first", evaluated[0].step, evaluated[0].loss))
        rows.append(("held-out rows, last", evaluated[-1].step, evaluated[-1].loss))
    if history.best:
        rows.append(("held-out rows, best", history.best.step, history.best.loss))
    shown = [(what, f"{step:,}", units.loss(loss)) for what, step, loss in rows]
    for what, records in (("training, last step", trained), ("held-out rows, last", evaluated)):
        for last in records[-1:]:
            shown += [
                (f"{name}: {what}", f"{last.step:,}", f"{value:.4g}")
                for name, value in last.metrics.items()
            ]
    return shown


def _software(environment: Mapping[str, Any]) -> list[Row]:
    versions = dict(environment.get("versions", {}))
    if "python" in environment:
        versions = {"python": environment["python"], **versions}
    rows = [(plain(name), code(str(version))) for name, version in versions.items()]
    return [*rows, *(("device", code(str(device))) for device in environment.get("devices", ()))]


def _loading(recipe: Mapping[str, Any], kind: Kind, folder: Path) -> str:
    """Python code that loads the current folder and completes a prompt or scores a text.

    An adapter gets the stop tokens of its folder, because PEFT uses those of the base model.
    """
    weights = next((path.name for path in folder.glob("*.gguf")), "model.gguf")
    scores, adapter = is_scorer(read_object(folder / "config.json")), kind == "adapter"
    text = rendered(
        "loading.py.jinja",
        gguf=weights if kind == "gguf" else "",
        adapter=adapter,
        scores=scores,
        settings=adapter and not scores and (folder / "generation_config.json").exists(),
        trusting=bool((recipe.get("model") or {}).get("trust_remote_code")),
        templated=(folder / "chat_template.jinja").exists(),
    )
    return text.strip()


def is_scorer(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a model with a score head."""
    kinds = config.get("architectures") or ()
    return any(str(kind).endswith("ForSequenceClassification") for kind in kinds)


def _stored_kind(model: Mapping[str, Any]) -> str | None:
    """Quantization of the base's own files; None without one, or if its config is not here."""
    name = model.get("name")
    for path in config_paths(name, model.get("revision")) if name else ():
        if path.is_file():
            return stored_kind(read_object(path))
    return None


def _stops(folder: Path) -> tuple[list[int], str]:
    """Ids of the stop tokens, and their names as text; empty if no file has them."""
    found = read_object(folder / "generation_config.json").get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    added = read_object(folder / "tokenizer.json").get("added_tokens", ())
    names = {each["id"]: each["content"] for each in added}
    return ids, " or ".join(f"{code(names[id])} ({id})" if id in names else str(id) for id in ids)


def _written(value: Any) -> str:
    """A value as it is written in a recipe's YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def code(text: str) -> str:
    """Text as inline code in Markdown, in more backticks than the text has in a row."""
    text = " ".join(text.split())
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def plain(text: str) -> str:
    """Text with characters of Markdown and HTML escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"
