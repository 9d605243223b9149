"""A vLLM server samples the completions of online methods, for which the loss is corrected.

The everyday tests use a small server on plain PEFT (`reference_server`); the slow ones run vLLM.
"""

import dataclasses
import math
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tiny, end_tree, wait_for
from documents import documents_of
from preference import sampled_fields, train
from reference_server import Served, serving
from test_deployed import free_port, is_up
from tiny_run import SIZES, byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finetune import catalog
from finetune.data.rows.collate import collate
from finetune.data.rows.store import Rows, TokenColumn, single_rows
from finetune.errors import FinetuneError, TrainingFailure
from finetune.kernels.head import give_loss
from finetune.methods.grpo import GRPO
from finetune.methods.online import ADVANTAGE, LARGEST_RATIO, MEAN_RATIO, OLD, SAMPLER, Online
from finetune.methods.rloo import RLOO
from finetune.recipe import Batch
from finetune.runs.run import Run
from finetune.training.online.vllm_server import VLLMServer, seed_of

NEAR_ONE = 1e-3
"""Of weights: log-probabilities in fp32, computed one token at a time and all at once."""
pytestmark = pytest.mark.usefixtures("prompts")


def fields(model: Path, prompts: Path, url: str, **others: Any) -> dict[str, Any]:
    given = sampled_fields(
        model, prompts, adapter={"r": 4}, batch={"max_length": 64}, optim={"lr": 2e-2},
        reward_funcs=["lengths:short"], max_completion_length=6, max_steps=3,
    )  # fmt: skip
    return given | {"saving": {"every": 1}, "vllm_server_base_url": url, **others}


def ratios(run: Run) -> list[tuple[float, float]]:
    """Mean and largest weight of each step."""
    metrics = [each["metrics"] for each in run.read_metrics("train")]
    return [(each[MEAN_RATIO], each[LARGEST_RATIO]) for each in metrics]


def two_completions(recipe: Online, shift: float) -> Rows:
    """Rows whose sampler was `shift` nats more certain of each token than the old policy."""
    documents = documents_of([
        (np.arange(1, 7, dtype=np.int32), np.arange(6) > 1),
        (np.arange(7, 13, dtype=np.int32), np.arange(6) > 2),
    ])  # fmt: skip
    old = np.where(documents.trained, -2.0, 0.0).astype(np.float32)
    columns = {OLD: old, SAMPLER: old + np.float32(shift)}
    return dataclasses.replace(
        single_rows(documents), padding_free=False,
        columns={ADVANTAGE: np.array([0.5, -0.25], dtype=np.float32)},
        token_columns={n: TokenColumn.at_labels(documents, v) for n, v in columns.items()},
    )  # fmt: skip


@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo", "cispo", "rloo"])
def test_a_term_is_multiplied_by_the_truncated_ratio_of_policies(tiny: Tiny, loss: str) -> None:
    """Equal weights on all tokens multiply the loss and its gradient."""
    batch = Batch(rows=2, max_length=64)
    shared: dict[str, Any] = {"num_generations": 2, "max_completion_length": 8, "batch": batch}
    recipe: Online = RLOO(**shared) if loss == "rloo" else GRPO(loss_type=loss, **shared)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    give_loss(model, chunked=True)
    found: dict[float, tuple[float, float]] = {}
    for shift in (0.0, 0.7, -0.7, -3.0):
        result = recipe.loss(model, collate(two_completions(recipe, shift), np.arange(2), 0, "cpu"))
        model.zero_grad()
        result.sum.backward()
        found[shift] = result.sum.item(), model.lm_head.weight.grad.norm().item()
        weight = min(math.exp(-shift), 3.0)
        total, count = result.metrics[MEAN_RATIO]
        assert float(total) / count == pytest.approx(weight, rel=1e-6)
        assert float(result.extremes[LARGEST_RATIO]) == pytest.approx(weight, rel=1e-6)
        assert found[shift] == pytest.approx([weight * each for each in found[0.0]], rel=1e-5)
    assert found[0.0][1] > 0


def test_seeds_of_completions_are_different_and_fit_in_63_bits() -> None:
    keys = [(s, t, r, n) for s in range(2) for t in range(3) for r in range(12) for n in range(12)]
    seeds = {seed_of(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(0, 1, 2, 3) == seed_of(0, 1, 2, 3)


def test_models_that_a_server_cannot_have_are_refused() -> None:
    given = {"method": "grpo", "reward_funcs": ["json_valid"]}
    url = {"vllm_server_base_url": "localhost:8000"}
    adapter = {"use_dora": True, "init_lora_weights": "pissa"}
    other: dict[str, Any] = {"adapter": adapter, "model": {"name": "m", "quantization": "nf4"}}
    assert catalog.from_fields({**given, **url, **other}).problems() == [
        "vllm_server_base_url: got 'localhost:8000', expected a URL such as http://localhost:8000",
        "vllm_server_base_url: vLLM does not support adapter.use_dora; set it to false",
        "vllm_server_base_url: adapter.init_lora_weights=pissa changes the base, which the server "
        "does not; use true",
        "vllm_server_base_url: model.quantization=nf4: the server has the base without it; use "
        "none",
    ]
    url = {"vllm_server_base_url": "http://localhost:8000"}
    (problem,) = catalog.from_fields({**given, **url}).problems()
    assert "all weights are trained" in problem


def test_servers_that_cannot_sample_for_the_run_are_refused(tiny: Tiny, prompts: Path) -> None:
    def checked(url: str, **others: Any) -> str:
        recipe = catalog.from_fields(fields(tiny.model, prompts, url, **others))
        assert isinstance(recipe, Online)
        with pytest.raises(FinetuneError) as refused:
            VLLMServer(recipe, prompts.parent / "adapters", "fp32", [0]).check()
        assert refused.value.exit_status == 2
        return str(refused.value)

    nobody = f"http://127.0.0.1:{free_port()}"
    assert checked(nobody).startswith(f"vllm_server_base_url: {nobody}/version: no answer")
    with serving(Served(tiny.model, version="0.9.2")) as url:
        assert "vLLM 0.9.2 is older than 0.32" in checked(url)
    with serving(Served(tiny.model, context=32)) as url:
        assert "max_model_len is 32, and batch.max_length is 64" in checked(f"{url}/v1")


def test_a_server_with_the_adapter_of_each_step_samples_a_run(tiny: Tiny, prompts: Path) -> None:
    """All weights are 1, because the server has the weights that are trained."""
    served = Served(tiny.model)
    with serving(served) as url:
        run = train(prompts.parent / "run", fields(tiny.model, prompts, url))
    assert ratios(run) == [pytest.approx((1, 1), abs=NEAR_ONE)] * 3
    assert [each["grad_norm"] > 0 for each in run.read_metrics("train")] == [True] * 3
    assert len(set(served.seeds)) == 1 + 3 * 8  # one for greedy answers
    assert served.loaded == []
    assert list(run.rollouts.iterdir()) == []


def test_a_server_with_another_base_is_refused(tiny: Tiny, prompts: Path) -> None:
    served = Served(tiny.model)
    served.model.lm_head.weight.data[:8] += 0.5
    with serving(served) as url, pytest.raises(FinetuneError, match="greedy answers differ") as no:
        train(prompts.parent / "run", fields(tiny.model, prompts, url))
    assert no.value.exit_status == 2


def test_a_server_that_fails_ends_the_run_with_its_progress_saved(tiny, prompts):
    served = Served(tiny.model)
    served.fails_after = 3 + 8 + 3 + 4  # greedy answers and completions, up to the second sampling
    given = fields(tiny.model, prompts, "", saving={"every": 100})
    with serving(served) as url, pytest.raises(TrainingFailure, match="status 500"):
        train(prompts.parent / "run", given | {"vllm_server_base_url": url})
    run = Run(prompts.parent / "run")
    assert [each.name for each in run.checkpoints.glob("step-*")] == ["step-00000001"]
    with serving(Served(tiny.model)) as url:  # another port
        again = train(run.root, given | {"vllm_server_base_url": url}, resume=True)
    assert len(ratios(again)) == 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("vllm") is None, reason="vllm is not on PATH")
def test_vllm_samples_a_run(tmp_path: Path, prompts: Path) -> None:
    """vLLM has attention on CPUs for heads of 32."""
    torch.manual_seed(1)
    sizes = {**SIZES, "num_attention_heads": 2, "max_position_embeddings": 256}
    base = tmp_path / "base"
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    port = free_port()
    words = ["vllm", "serve", str(base), "--enable-lora", "--dtype", "float32", "--enforce-eager",
             "--logprobs-mode", "processed_logprobs", "--port", str(port)]  # fmt: skip
    more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1"}  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | more
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: is_up(url), process, 300)
        given = fields(base, prompts, url, temperature=0.7)
        assert ratios(train(tmp_path / "run", given)) == [pytest.approx((1, 1), abs=NEAR_ONE)] * 3
        again = train(tmp_path / "rloo", given | {"method": "rloo", "num_iterations": 2})
        assert ratios(again)[0] == pytest.approx((1, 1), abs=NEAR_ONE)
        with pytest.raises(FinetuneError, match="--max-lora-rank 32"):
            train(tmp_path / "wide", given | {"adapter": {"r": 32}})
    finally:
        process.send_signal(signal.SIGINT)
        end_tree(process.pid)
        process.communicate()
