"""Check which architectures train, export and reload correctly, and which are rejected and why.

    python -m benchmarks models

writes the table in `docs/models.md`. Each architecture is a tiny model with random weights. The
checks are those of `finetune doctor`: losses and gradients against plain transformers + PEFT,
documents side by side, two steps, and loading the result in a process without this package.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.methods.sft import SFT
from finetune.recipe import Data, Model
from finetune.verification.model_checks.examination import Examination
from finetune.verification.model_checks.finding import Finding
from finetune.verification.proofs.fixtures import write_data, write_tokenizer
from finetune.verification.proofs.shrink import shrink
from finetune.verification.proofs.small_recipe import Kind, of_kind

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- table: python -m benchmarks models -->", "<!-- end of the table -->"
SIDE_BY_SIDE, EXPORT = "documents side by side", "saved, reloaded, merged"
KINDS: dict[Kind, str] = {"lora": "LoRA", "qlora": "QLoRA", "full": "all weights"}
COLUMNS = (*KINDS.values(), "export", "side by side")
Answer = Literal["right", "refused", "padded", "wrong", ""]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "mixtral": {}, "qwen2": {}, "qwen2_moe": {}, "qwen3": {},
    "qwen3_moe": {}, "qwen3_next": {}, "qwen3_5_text": {}, "gemma": {}, "gemma2": {},
    "gemma3_text": {}, "gemma3": {}, "phi": {}, "phi3": {}, "gpt2": {}, "gpt_neox": {}, "gptj": {},
    "opt": {}, "bloom": {}, "falcon": {}, "stablelm": {}, "starcoder2": {}, "olmo2": {},
    "smollm3": {}, "glm4": {}, "granite": {}, "granitemoe": {}, "cohere2": {},
    "deepseek_v3": {}, "gpt_oss": {}, "minimax": {}, "mamba": {}, "jamba": {}, "nemotron_h": {},
    "lfm2": {},
    # types that must be rejected
    "bert": {}, "roberta": {}, "llama4_text": {}, "t5": {}, "whisper": {},
}  # fmt: skip
"""Model types, with fields that differ from the shrunk default configuration."""


EAGER = ("gptj", "bloom")
"""Types without SDPA in transformers, which need `model.attention=eager`."""


@dataclasses.dataclass(frozen=True)
class Row:
    """An architecture with its outcomes by column, and the reasons for rejections and padding."""

    name: str
    answers: dict[str, Answer]
    reasons: dict[str, str]


def measure(folder: Path, names: Sequence[str] = tuple(ARCHITECTURES)) -> list[Row]:
    """Examine each architecture with LoRA, QLoRA and all weights."""
    answers: dict[str, dict[str, Answer]] = {name: {} for name in names}
    reasons: dict[str, dict[str, str]] = {name: {} for name in names}
    write_data(folder / "rows.jsonl", "messages")
    for name in names:
        model = build(name, folder / name)
        for kind, column in KINDS.items():
            recipe = of_kind(SFT(model, data=(Data(str(folder / "rows.jsonl"), "messages"),)), kind)
            examined = Examination(recipe, folder / f"{name}-{kind}", folder / "cache")
            found = {each.name: each for each in examined.findings()}
            answer, reason = judged(found)
            answers[name][column] = answer
            if reason:
                reasons[name][column] = reason
            if answer == "right" and kind != "qlora" and answers[name].get("export") != "wrong":
                export = found[EXPORT]
                answers[name]["export"] = "right" if export.passed else "wrong"
                if not export.passed:
                    reasons[name]["export"] = export.why
            side = found.get(SIDE_BY_SIDE)
            if side is not None and answer == "right" and kind == "lora":
                answers[name]["side by side"] = "padded" if side.passed is None else "right"
                if side.passed is None:
                    reasons[name]["side by side"] = side.why
        print(name, answers[name], reasons[name], flush=True)
    return [Row(name, answers[name], reasons[name]) for name in names]


def build(name: str, home: Path) -> Model:
    """A tiny model of a type with random weights and a small tokenizer."""
    write_tokenizer(home)
    tokenizer = AutoTokenizer.from_pretrained(home)
    try:
        defaults = AutoConfig.for_model(name)
        defaults.save_pretrained(home)
        rows = len(AutoTokenizer.from_pretrained(home))  # some types add their own tokens
        fields = shrink(defaults.to_dict(), rows, 256)
        fields |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        fields |= {"bos_token_id": None} | ARCHITECTURES[name]
        torch.manual_seed(0)
        config = AutoConfig.for_model(**fields)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, KeyError):  # no causal language model of transformers: a config is enough
        pass
    else:
        network.save_pretrained(home)
    return Model(str(home), attention="eager" if name in EAGER else "sdpa")


def judged(found: dict[str, Finding]) -> tuple[Answer, str]:
    """The outcome of a training method (right, rejected early, or wrong), and the reason.

    The export has a column of its own.
    """
    for each in found.values():
        if each.passed is False and each.name != EXPORT:
            early = each.name in ("plan", "two layers of it", "loss")
            refused = each.name == "causal" or (each.refused and early)
            return ("refused" if refused else "wrong"), each.why
    return "right", ""


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, with their reasons below."""
    lines = [f"| architecture | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for row in rows:
        cells = (row.answers.get(column, "") for column in COLUMNS)
        eager = " (`model.attention=eager`)" if row.name in EAGER else ""
        lines.append(f"| `{row.name}`{eager} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_told(rows)])


def _told(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        by_reason: dict[str, list[str]] = {}
        for column, reason in row.reasons.items():
            by_reason.setdefault(reason, []).append(column)
        for reason, columns in by_reason.items():
            yield f"- `{row.name}`, {', '.join(columns)}: {reason}"


def write(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Write the table between its marks in the page."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")
