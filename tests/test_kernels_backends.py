"""The kernels compute what plain transformers and PEFT do, on one process and on several."""

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Finetune, Tiny, write_recipe
from test_backends import FP32, largest, launch, losses

from finetune.runs.run import Run

PLAIN = {
    "kernels": {
        "head": "whole", "lora": "separate", "norm": "plain", "activation": "plain",
        "rotary": "plain",
    }
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": {"r": 8}, "optim": {"lr": 5e-3}},
    "nf4": {"adapter": {"r": 8}, "model": {"quantization": "nf4"}, "optim": {"lr": 5e-3}},
}
EVERYDAY = [
    *((kind, backend) for kind in KINDS for backend in ("single", "ddp")),
    ("lora", "fsdp_full_shard"), ("lora", "zero3"),
]  # fmt: skip
NOW_AND_THEN = [
    ("full", "fsdp_full_shard"), ("nf4", "zero3"), ("lora", "fsdp_shard_grad_op_offload"),
    ("lora", "zero2"),
]  # fmt: skip

Trained = Callable[..., Run]


@pytest.fixture(scope="module")
def trained(tiny: Tiny, finetune: Finetune, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("kernels")

    def run(kind: str, backend: str, **sections: Any) -> Run:
        place = root / kind / (backend + "-".join(sections))
        if not place.exists():
            model = {"name": str(tiny.model)} | KINDS[kind].get("model", {})
            fields = tiny.fields(**(KINDS[kind] | sections | {"model": model}))
            recipe = write_recipe(root / f"{kind}-{'-'.join(sections)}.json", fields)
            launch(finetune, recipe, backend, place)
        return Run(place)

    return run


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*EVERYDAY, *(pytest.param(*each, marks=pytest.mark.slow) for each in NOW_AND_THEN)],
)
def test_losses_are_those_of_plain_transformers_and_peft(trained, kind, backend):
    plain, ours = trained(kind, "single", **PLAIN), trained(kind, backend)
    assert largest(losses(plain), losses(ours)) < FP32
    assert largest(losses(plain, "eval"), losses(ours, "eval")) < FP32
    norms = [[r["grad_norm"] for r in run.read_metrics("train")] for run in (plain, ours)]
    assert largest(*norms) < 1e-4  # norms of about 3


@pytest.mark.slow
def test_compiled_kernels_train_the_same_and_are_kept(trained, tiny, finetune, tmp_path):
    plain = trained("lora", "single", **PLAIN)
    fields = tiny.fields(**KINDS["lora"], kernels={"pointwise": "compiled"})
    recipe = write_recipe(tmp_path / "r.json", fields)
    done = finetune(
        "launch", recipe, "--backend", "ddp", "--processes", "2", "--precision", "fp32",
        "--output", tmp_path / "run", env={"FINETUNE_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.status == 0, done.output
    assert "kernels.pointwise: compiled, for " in done.output
    assert largest(losses(plain), losses(Run(tmp_path / "run"))) < FP32
    assert list((tmp_path / "cache" / "compiled").rglob("*.so"))


def test_a_run_continues_with_other_kernels(trained, tiny, finetune, tmp_path):
    ours = trained("lora", "single")
    fields = tiny.fields(**KINDS["lora"], **PLAIN, max_steps=8)
    recipe = write_recipe(tmp_path / "r.json", fields)
    done = finetune("train", recipe, "--precision", "fp32", "--output", ours.root, "--resume")
    assert done.status == 0, done.output
    assert len(losses(ours)) == 8


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"adapter": {"r": 4, "dropout": 0.1}}, "kernels.lora: separate, because adapter.dropout"),
        (
            {"adapter": {"r": 4, "targets": ["q_proj", "lm_head"]}},
            "kernels.head: whole, because the head has an adapter",
        ),
        (
            {"adapter": {"r": 4, "targets": ".*(q_proj|lm_head)"}},
            "kernels.head: whole, because the head has an adapter",
        ),
    ],
)
def test_the_plan_and_the_run_say_what_falls_back(tiny, finetune, tmp_path, sections, told):
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=1, **sections))
    planned = finetune("plan", recipe)
    assert told in planned.stdout
    done = finetune("train", recipe, "--precision", "fp32", "--output", tmp_path / "run")
    assert done.status == 0, done.output
    assert told in " ".join(done.output.split())
