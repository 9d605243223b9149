"""Samplings, teachers and references under backends that divide a model, as on one process."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finetune, Tiny, write_recipe
from test_dpo import pairs, train
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.methods.distill import Distill
from finetune.methods.grpo import GRPO
from finetune.planner import plan
from finetune.recipe import Batch, Data, LoRA, Model, Teacher
from finetune.rewards import Reward
from finetune.runs.run import Run
from finetune.verification.proofs.checks import compare_steps, weights_apart
from finetune.verification.proofs.matrix import FP32
from finetune.verification.proofs.runs import steps_of
from finetune.verification.proofs.sampled import differences, scale_of

STEPS = 2
VOWELS = "finetune.verification.proofs.fixtures:vowels"


class Work:
    """Recipes, and the runs of one process."""

    def __init__(self, tiny: Tiny, folder: Path) -> None:
        self.tiny, self.folder = tiny, folder
        self.model, self.other = (
            str(_saved(tiny, folder / name, layers, seed))
            for name, layers, seed in (("model", 2, 7), ("other", 2, 8))
        )
        rows = [{"prompt": "the cat sees a red dog".split()[n % 6]} for n in range(12)]
        self.sources = {"prompts": _written(folder / "prompts.jsonl", rows)}
        self.sources["preference"] = _written(folder / "pairs.jsonl", pairs())
        self.alone: dict[str, Run] = {}

    def fields(self, method: str, **own: Any) -> dict[str, Any]:
        form = {"grpo": "prompts", "dpo": "preference"}.get(method, "messages")
        given: dict[str, Any] = {
            "method": method,
            "model": {"name": self.model},
            "data": [{"source": self.sources.get(form, str(self.tiny.data)), "format": form}],
            "batch": {"rows": 8, "micro_rows": 2, "max_length": 128},
            "optim": {"lr": 1e-3, "warmup": 0},
            "saving": {"every": 1},
            "data_checks": "report",
            "max_steps": STEPS,
        }
        if method == "grpo":
            given |= {
                "reward_funcs": [{"function": VOWELS}], "num_generations": 4,
                "max_completion_length": 6, "num_iterations": 2, "beta": 0.05,
            }  # fmt: skip
        return given | own

    def both(self, finetune: Finetune, given: dict[str, Any], backend: str) -> tuple[Run, Run]:
        """The run of one process, made once, and one on a backend."""
        key = json.dumps(given)
        if key not in self.alone:
            self.alone[key] = train(self.folder / f"alone-{len(self.alone)}", given)
        run = Run(self.folder / f"{backend}-{len(list(self.folder.iterdir()))}")
        done = finetune(
            "launch", write_recipe(run.root.with_suffix(".json"), given), "--backend", backend,
            "--precision", "fp32", "--output", run.root, "--no-plot",
        )  # fmt: skip
        assert done.status == 0, done.output
        return self.alone[key], run


def _saved(tiny: Tiny, folder: Path, layers: int, seed: int) -> Path:
    """A tied Qwen3 whose logits differ between tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer), tie_word_embeddings=True,
        max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def work(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tiny, tmp_path_factory.mktemp("divided"))


def assert_equal(alone: Run, run: Run) -> None:
    """Losses, norms, weights and what was sampled, within what a proof allows."""
    steps, scale = range(1, STEPS + 1), scale_of(catalog.load(alone.recipe))
    wrong, _ = compare_steps(steps_of(alone.metrics), steps_of(run.metrics), steps, FP32, scale)
    assert wrong == differences(alone, run, FP32) == []
    assert weights_apart(alone, run, STEPS) <= FP32.weights


ADAPTED = {"adapter": {"r": 4, "targets": "all-linear"}}


def test_completions_of_gathered_weights_are_those_of_one_process(work, finetune):
    """Two samplings: before the first step, and after an update of the divided adapter.

    Four completions at a time: both batches of one process, one batch of each of two.
    """
    given = work.fields("grpo", **ADAPTED, num_iterations=1, sampling_rows=4)
    alone, run = work.both(finetune, given, "tp")
    assert_equal(alone, run)
    taken = [
        next(iter(each.read_metrics("train")))["metrics"]["sampling/memory"]
        for each in (alone, run)
    ]
    planned = json.loads(run.plan.read_text())["prediction"]["sampling_weights"]
    assert taken[1] - taken[0] == planned


def test_a_divided_teacher_gives_the_losses_of_one_process(work, finetune):
    given = work.fields("distill", teacher={"name": work.other}, loss_type="jsd", ce_weight=0.3)
    alone, run = work.both(finetune, given, "tp")
    assert_equal(alone, run)
    for counted in run.read_metrics("memory"):
        assert counted["peaks"] == pytest.approx(counted["planned"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "own", "backend"),
    [
        ("grpo", {}, "pp"),  # whose reference at the start is a second divided model
        ("grpo", ADAPTED | {"batch": {"rows": 16, "micro_rows": 2, "max_length": 128}}, "tp_fsdp"),
        ("dpo", {"reference": "other"}, "tp"),
        ("dpo", {"reference": "other"}, "pp"),
    ],
)
def test_a_divided_method_learns_what_one_process_learns(work, finetune, method, own, backend):
    named = {"reference": work.other} if "reference" in own else {}
    assert_equal(*work.both(finetune, work.fields(method, **own | named), backend))


@pytest.mark.slow
def test_a_stored_teacher_is_read_by_stages_and_parts_of_rows(work, finetune):
    given = work.fields("distill", teacher={"name": work.other})
    folder = work.folder / "stored"
    done = finetune("teach", write_recipe(work.folder / "teach.json", given), "--output", folder)
    assert done.status == 0, done.output
    del given["teacher"]
    for backend in ("pp", "sp"):
        assert_equal(*work.both(finetune, given | {"teacher_logps": str(folder)}, backend))


@pytest.mark.parametrize(
    ("method", "backend", "problem"),
    [
        (Distill(teacher=Teacher("models/large")), "pp", ""),
        (Distill(teacher=Teacher("m", quantization="nf4")), "tp", "teacher.quantization: nf4"),
        (Distill(teacher_logps="stored"), "pp", ""),
        (GRPO(), "pp", ""),
        (GRPO(), "sp", "compares complete completions, and sp splits them"),
        (GRPO(vllm_server_base_url="http://x", adapter=LoRA()), "tp", "divides the adapter that"),
        (GRPO(beta=0.1), "tp_fsdp", "beta: its reference is a second model"),
    ],
)
def test_what_is_not_gathered_is_refused(method, backend, problem):
    recipe = dataclasses.replace(
        method, model=Model("models/small"), batch=Batch(rows=16, micro_rows=1, max_length=300)
    )
    if isinstance(method, GRPO):
        recipe = dataclasses.replace(recipe, reward_funcs=(Reward("json_valid"),))
    kind = "prompts" if isinstance(method, GRPO) else "messages"
    found: list[str] = []
    try:
        plan(recipe.with_data(Data("rows.jsonl", kind)), backend)
    except FinetuneError as error:
        found = [each for each in error.problems if not each.startswith("processes")]
    assert [problem in each for each in found] == ([True] if problem else [])
