"""Sums and means of two processes are those of all rows of a step, not of each process alone."""

import json

import pytest
from conftest import FP32, Train
from preference import pairs

from finetune.runs.run import Run


def values(run: Run, name: str, kind: str = "train") -> list[float]:
    return [(record | record.get("metrics", {}))[name] for record in run.read_metrics(kind)]


def test_losses_norms_and_evaluations_are_means_over_all_tokens(run_of: Train) -> None:
    """The rows have 1 to 40 answered words, so that the processes have uneven numbers of tokens."""
    one, two = run_of("single"), run_of("ddp")
    assert values(two, "loss") == pytest.approx(values(one, "loss"), abs=FP32)
    assert values(two, "loss", "eval") == pytest.approx(values(one, "loss", "eval"), abs=FP32)
    # A sum in another order moves the seventh digit of a gradient.
    assert values(two, "grad_norm") == pytest.approx(values(one, "grad_norm"), rel=1e-5)


def test_the_kl_of_kto_is_over_the_answers_of_both_processes(tiny, run_of, tmp_path):
    """Held out are three answers, so that one process has two of them and the other one."""
    source = tmp_path / "judged.jsonl"
    source.write_text(
        "".join(
            json.dumps({"prompt": row["prompt"], "completion": row["chosen"], "label": n % 3 != 0})
            + "\n"
            for n, row in enumerate(pairs())
        )
    )
    fields = tiny.fields(
        method="kto",
        data=[{"source": str(source), "format": "kto"}],
        eval_data=[],
        eval_rows=3,
        batch={"micro_rows": 1},
        optim={"warmup": 0, "schedule": "constant", "max_grad_norm": None},
        max_steps=2,
    )
    one, two = run_of("single", fields=fields), run_of("ddp", fields=fields)
    assert values(one, "kl")[-1] > 0.1
    for kind in ("train", "eval"):
        # Sums of tens of nats in fp32, in the order of another batch.
        assert values(two, "kl", kind) == pytest.approx(values(one, "kl", kind), abs=1e-4)
        assert values(two, "loss", kind) == pytest.approx(values(one, "loss", kind), rel=1e-5)
