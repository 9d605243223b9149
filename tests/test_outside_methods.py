"""Methods from outside the package that look at a complete step, or use one more model."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Tiny, apart, cut_off, losses, write_recipe, written
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finetune.runs.run import Run

PATHS = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
WORDS = "yes no maybe always never often here there".split()


@pytest.fixture
def pairs(tiny: Tiny, tmp_path):
    rows = [
        {"prompt": f"say {word} ", "completion": word * times}
        for times, word in enumerate(WORDS, start=1)
    ]
    source = written(tmp_path / "pairs.jsonl", rows)
    data = [{"source": str(source), "format": "prompt_completion"}]
    return tiny.fields(
        method="outside_methods:Contrastive", eval_rows=None, batch={"rows": 4},
        evaluation={"every": 2}, saving={"every": 2}, max_steps=4, optim={"lr": 1e-2},
    ) | {"data": data, "eval_data": data}  # fmt: skip


@pytest.mark.slow
def test_negatives_of_a_whole_step_do_not_depend_on_micro_batches_or_ranks(
    pairs, finetune, tmp_path
):
    def trained(name: str, *words: str, micro_rows: int = 2):
        fields = pairs | {"batch": pairs["batch"] | {"micro_rows": micro_rows}}
        recipe = write_recipe(tmp_path / f"{name}.json", fields)
        place = tmp_path / name
        finetune(*words, recipe, "--output", place, "--precision", "fp32", env=PATHS).passed()
        return Run(place)

    whole = trained("whole", "train", micro_rows=4)
    assert losses(whole)[-1] < losses(whole)[0]
    launch = ("launch", "--processes", "2", "--backend")
    others = [
        trained("single", "train", micro_rows=1),
        trained("shards", *launch, "fsdp_full_shard", micro_rows=1),
        trained("zero3", *launch, "zero3"),
    ]
    for other in others:
        for kind in ("train", "eval"):
            assert apart(whole, other, kind) < 1e-5
    # The evaluation by plain transformers: every pair against every other.
    folder = whole.final
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = Path(pairs["data"][0]["source"]).read_text().splitlines()
    with torch.no_grad():
        sides = [
            torch.cat([
                model(**tokenizer(json.loads(line)[side], return_tensors="pt")).logits
                for line in rows
            ])
            for side in ("prompt", "completion")
        ]  # fmt: skip
    asked, said = (normalize(side, dim=-1) for side in sides)
    expected = cross_entropy(asked @ said.T / 0.1, torch.arange(len(asked)))
    assert losses(whole, "eval")[-1] == pytest.approx(expected.item(), rel=1e-4)


def test_values_of_one_more_model_are_computed_once_and_kept(tiny, finetune, tmp_path):
    judge = tiny.other(tmp_path / "judge", "llama", seed=3)
    fields = tiny.fields(
        method="outside_methods:Weighted", judge=str(judge), max_steps=4,
        saving={"every": 2, "keep": 3},
    )  # fmt: skip
    recipe = write_recipe(tmp_path / "recipe.json", fields)
    given = ("--precision", "fp32", "--output")
    finetune("train", recipe, *given, tmp_path / "run", env=PATHS).passed()
    whole = Run(tmp_path / "run")
    judged = whole.values.read_bytes()
    cut = cut_off(whole, tmp_path / "cut", 2)
    (judge / "config.json").rename(judge / "away.json")  # it is not asked again
    finetune("train", recipe, "--resume", *given, cut.root, env=PATHS).passed()
    assert apart(whole, cut) < 1e-6
    assert cut.values.read_bytes() == judged
    cut.values.unlink()
    failed = finetune("train", recipe, "--resume", "max_steps=5", *given, cut.root, env=PATHS)
    assert failed.status == 2
    assert "values.npz: the values of the documents cannot be read" in failed.stderr
