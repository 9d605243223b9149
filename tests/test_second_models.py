"""The plan counts the models next to the one that is trained: references and reward models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny
from preference import pairs, train, written
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from finetune import GRPO, Batch, Data, Model, Reward, backend, catalog
from finetune.data.samples import Completion
from finetune.errors import FinetuneError
from finetune.inference import score
from finetune.planner.estimate import hardware, memory
from finetune.planner.estimate.judges import judges
from finetune.planner.estimate.predict import model_source, predict, workload_of
from finetune.planner.plan import plan
from finetune.training.memory_meter import counting
from finetune.training.passes import DataPasses

LARGE = LlamaConfig(
    vocab_size=316, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
    tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=2, num_labels=1,
)  # fmt: skip
PARAMETERS = 2 * 316 * 256 + 4 * (4 * 256**2 + 3 * 256 * 768 + 2 * 256) + 256


def saved(tiny: Tiny, folder: Path, kind: Any) -> Path:
    """A model of 14 MB with the tokenizer of the tiny one."""
    kind(LARGE).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(folder)
    return folder


def of_method(tiny: Tiny, folder: Path, method: str, kind: str, **own: Any) -> dict[str, Any]:
    rows = [row if kind == "preference" else {"prompt": row["prompt"]} for row in pairs(8)]
    source = written(folder / "rows.jsonl", rows)
    return {
        "method": method, "model": {"name": str(tiny.model)}, "max_steps": 1,
        "data": [{"source": str(source), "format": kind}], "batch": {"rows": 8, "max_length": 128},
        "reference": str(saved(tiny, folder / "other", LlamaForCausalLM)), **own,
    }  # fmt: skip


def test_a_second_model_of_an_online_method_is_part_of_every_moment(tiny, tmp_path):
    own = {"beta": 0.1, "reward_funcs": ["json_valid"], "num_generations": 4}
    given = of_method(tiny, tmp_path, "grpo", "prompts", **own, max_completion_length=16)
    (counted,) = train(tmp_path / "run", given).read_metrics("memory")
    assert counted["peak"] > 4 * PARAMETERS
    assert counted["peak"] == pytest.approx(counted["predicted"], rel=0.05)


def test_a_reference_that_runs_before_the_first_step_is_a_moment_of_its_own(
    tiny, tmp_path, monkeypatch
):
    measured: list[int] = []
    of_documents = DataPasses.of_documents

    def counted(*given: Any, **named: Any) -> Any:
        with counting(torch.device("cpu")) as found:
            numbers = of_documents(*given, **named)
        measured.extend(found)
        return numbers

    monkeypatch.setattr(DataPasses, "of_documents", counted)
    given = of_method(tiny, tmp_path, "dpo", "preference")
    given["batch"] |= {"share_prompts": False}  # another model never shares them
    run = train(tmp_path / "run", given)
    settled = plan(catalog.load(run.recipe), backend.load("single"), 1, "fp32")
    workload = workload_of(settled, model_source(settled.recipe).shape)
    longest = json.loads(run.plan.read_text())["prediction"]["length"]  # mean of a pair's answers
    timeline = memory.timeline(dataclasses.replace(workload, rows=2, length=longest))
    assert timeline.peak.name == "reference pass"
    assert timeline.peak.parts["reference"] == 4 * PARAMETERS
    assert timeline.peak.parts["activations"] == pytest.approx(measured[0], rel=0.1)
    (step,) = run.read_metrics("memory")
    assert step["predicted"] < 4 * PARAMETERS  # the step's own peak is without it


def test_a_reward_model_is_planned_with_its_forward_pass(tiny: Tiny, tmp_path: Path) -> None:
    folder = saved(tiny, tmp_path / "judge", LlamaForSequenceClassification)
    recipe = GRPO(
        Model(str(folder)), data=(Data("prompts.jsonl", "prompts"),), batch=Batch(16, 4, 128),
        reward_funcs=(Reward(str(folder)),), max_completion_length=64,
    )  # fmt: skip
    (planned,) = judges(recipe, cpu=True)
    scorer = score._scorer(str(folder))
    weights = sum(each.nbytes for each in scorer.network.parameters())
    assert planned.weights == weights
    sequence = Completion("", "x" * 127)  # and its end token
    with counting(torch.device("cpu")) as activations:
        scorer([sequence] * 16)
    assert planned.activations == pytest.approx(activations[0], rel=0.05)
    settled = plan(recipe, backend.load("single"), 1, "bf16")
    card = hardware.Machine(hardware.gpu("h100-80"))
    found = predict(settled, card)
    (there,) = judges(recipe, cpu=False)
    assert there.weights == weights / 2
    left = card.gpu.memory - card.outside - card.gpu.context - there.memory
    assert found.usable == pytest.approx(left * hardware.RESERVE)
    assert f"reward model {folder}: 7 MB of weights" in found.page()
    gone = dataclasses.replace(recipe, reward_funcs=(Reward("runs/gone"),))
    with pytest.raises(FinetuneError, match="reward_funcs: 'runs/gone': the folder does not exist"):
        judges(gone, cpu=True)
