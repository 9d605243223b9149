"""Recipes of methods that learn from pairs, labels and rewards, and the numbers of their runs."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny, merged, once, written
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune as ft
from finetune import catalog
from finetune.backend import Precision
from finetune.reports.inspection import inspect
from finetune.runs.run import Run
from finetune.training.run_options import Options

ROWS, SIZE, SEED = 24, 8, 0
EXACT = 1e-5
"""Relative, in fp32: the same sums in another order."""
WORDS = "the a cat dog sees red blue house tree runs sings over under quickly and then".split()
Steps = list[dict[str, float]]

CUTS: dict[str, dict[str, Any]] = {
    "one at a time": {"micro_rows": 1, "padding_free": True},
    "by tokens, padded": {"micro_tokens": 300, "padding_free": False},
}
"""Ways to compute a step of eight rows."""


def pairs(count: int = ROWS, seed: int = 5) -> list[dict[str, Any]]:
    """Prompts with two answers of uneven lengths."""
    rng = random.Random(seed)

    def said(longest: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))

    return [
        {
            "prompt": [{"role": "user", "content": f"{said(12)} {number}"}],
            "chosen": [{"role": "assistant", "content": f"{said(20)} yes"}],
            "rejected": [{"role": "assistant", "content": f"{said(20)} no"}],
        }
        for number in range(count)
    ]


def pairs_file(shared: Path) -> Path:
    """The file of `pairs()` that all tests of a session read."""
    return once(shared / "methods/pairs.jsonl", lambda path: written(path, pairs()))


def fields_of(method: str, name: Path, source: Path, kind: str, **sections: Any) -> dict[str, Any]:
    """A recipe of two steps of eight rows at a constant rate, on data of a kind of format."""
    base: dict[str, Any] = {
        "method": method,
        "model": {"name": str(name)},
        "data": [{"source": str(source), "format": kind}],
        "batch": {"rows": SIZE, "micro_rows": SIZE, "max_length": 128},
        "optim": {"lr": 1e-3, "warmup": 0, "schedule": "constant", "max_grad_norm": None},
        "max_steps": 2,
        "seed": SEED,
    }
    return merged(base, sections)


def sampled_fields(name: Path, source: Path, **sections: Any) -> dict[str, Any]:
    """A recipe of one step of GRPO: four completions of each of two prompts."""
    base: dict[str, Any] = {
        "method": "grpo", "model": {"name": str(name)},
        "data": [{"source": str(source), "format": "prompts"}],
        "batch": {"rows": 8, "micro_rows": 4, "max_length": 80}, "optim": {"lr": 2e-3},
        "num_generations": 4, "max_completion_length": 10, "max_steps": 1,
    }  # fmt: skip
    return merged(base, sections)


def completions(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.completions.read_text().splitlines()]


def train(
    place: Path, given: dict[str, Any], resume: bool = False, precision: Precision = "fp32"
) -> Run:
    """Train in this process, where the fixture of the same name does not reach."""
    options = Options(place, resume, plot=False)
    return ft.train(catalog.from_fields(given), precision=precision, options=options)


def steps_of(run: Run, without: Sequence[str] = ()) -> Steps:
    """Loss, norm and metrics of each step."""
    return [
        {"loss": each["loss"], "grad_norm": each["grad_norm"]}
        | {name: value for name, value in each["metrics"].items() if name not in without}
        for each in run.read_metrics("train")
    ]


def assert_equal(found: Steps, wanted: Steps, rel: float = EXACT, near: float = 0.0) -> None:
    assert len(found) == len(wanted)
    for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert mine == pytest.approx(theirs, rel=rel, abs=near), step


def assert_equal_losses(found: Steps, wanted: Steps) -> None:
    losses = [[each["loss"] for each in steps] for steps in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)


def packed_and_alone(given: dict[str, Any], folder: Path) -> list[Run]:
    """Two runs with all rows in each step: in packs, and one by one."""
    packing = {"packing": True, "rows": 2, "micro_rows": 1}
    packs = counted(given | {"batch": given["batch"] | packing})["rows"]
    assert 2 < packs < ROWS
    return [
        train(folder / name, given | {"batch": given["batch"] | batch})
        for name, batch in (("packed", packing | {"rows": packs}), ("alone", {"rows": ROWS}))
    ]


def counted(given: dict[str, Any]) -> dict[str, Any]:
    """Counts of the training rows of a recipe."""
    return inspect(catalog.from_fields(given), rows=1).counts["train"]


def plain(tiny: Tiny) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)


def sequences(tiny: Tiny) -> list[tuple[tuple[list[int], int], ...]]:
    """Of each pair both sequences, with the number of tokens of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)

    def ids(messages: list[dict[str, str]], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return tokenizer(text if prompt else text.removesuffix("\n"))["input_ids"]

    return [
        tuple(
            (ids(row["prompt"] + row[name], False), len(ids(row["prompt"], True)))
            for name in ("chosen", "rejected")
        )
        for row in pairs()
    ]


def logp(model: Any, ids: list[int], prompt: int, weights: Any = 1.0) -> torch.Tensor:
    return answer_sums(model, ids, prompt, weights)[0]


def answer_sums(
    model: Any, ids: list[int], prompt: int, weights: Any = 1.0
) -> tuple[torch.Tensor, float, float]:
    """The log-probability of an answer, and the sums over its tokens of mean logit and entropy."""
    logits = model(torch.tensor([ids])).logits[0, prompt - 1 : -1]
    said = logits.log_softmax(-1)[torch.arange(len(ids) - prompt), torch.tensor(ids[prompt:])]
    entropy = Categorical(logits=logits.detach().double()).entropy().sum().item()
    return (said.double() * weights).sum(), logits.double().mean(-1).sum().item(), entropy


def other_model(tiny: Tiny, folder: Path) -> Path:
    """A model with the same tokenizer and other weights."""
    model = plain(tiny)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(folder)
    return folder


def with_another_vocabulary(model: Path, folder: Path) -> Path:
    """A copy of a model in which one token has another name."""
    shutil.copytree(model, folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"<|im_start|>"', '"<|begin|>"'))
    return folder
