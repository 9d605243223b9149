"""Methods on documents whose tokens several processes share: the same numbers as one process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny, write_recipe
from test_division import assert_planned, train
from test_dpo import pairs

import finetune as ft
from finetune import catalog
from finetune.data.collate import UNTRAINED, Boundaries, MicroBatch
from finetune.distributed.sequence import part
from finetune.errors import FinetuneError
from finetune.methods.losses import token_logps
from finetune.runs.run import Run
from finetune.verification.proofs.checks import compare_steps, weights_apart
from finetune.verification.proofs.matrix import FP32
from finetune.verification.proofs.runs import steps_of

STEPS = 2
OF_METHODS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "sft_weight": 0.1},
    "ipo": {"method": "dpo", "loss_type": "ipo", "beta": 0.3},
    "orpo": {},
    "simpo": {},
    "cpo": {},
    "kto": {"beta": 0.3},
    "reward": {"center_rewards_coefficient": 0.01},
    "classifier": {"labels": ["no", "yes"]},
}


@pytest.fixture(scope="module")
def work(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of each method, with all weights and with LoRA."""
    folder = tmp_path_factory.mktemp("documents")
    rows = pairs(32)
    both = [(row, row[name][0], name) for row in rows for name in ("chosen", "rejected")]
    sources: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "kto": ("kto", [
            {"prompt": row["prompt"], "completion": [answer], "label": name == "chosen"}
            for row, answer, name in both
        ]),
        "classifier": ("labelled", [
            {"text": answer["content"], "label": "yes" if name == "chosen" else "no"}
            for _, answer, name in both
        ]),
    }  # fmt: skip
    for name, changes in OF_METHODS.items():
        kind, found = sources.get(name, ("preference", rows))
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        given: dict[str, Any] = {
            "method": name,
            "model": {"name": str(tiny.model)},
            "data": [{"source": str(path), "format": kind}],
            "eval_rows": 5,
            "batch": {"rows": 8, "micro_rows": 2, "max_length": 128},
            "optim": {"lr": 1e-3, "warmup": 0, "max_grad_norm": 0.5},
            "saving": {"every": 1},
            "evaluation": {"every": STEPS},
            "data_checks": "report",
            "max_steps": STEPS,
        } | changes
        if name == "kto":  # one row at a time, so that some parts have no label
            given["batch"]["micro_rows"] = 1
        write_recipe(folder / f"{name}.json", given)
        adapter = {"adapter": {"r": 4, "targets": "all-linear"}}
        write_recipe(folder / f"{name}-lora.json", given | adapter)
        packing = given["batch"] | {"packing": True, "micro_rows": 1, "rows": 4}
        write_recipe(folder / f"{name}-packed.json", given | {"batch": packing})
    return folder


def train_alone(work: Path, name: str) -> Run:
    """A run of a recipe on one process, which is this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(work / "cache"))
        recipe = catalog.resolve(str(work / f"{name}.json"))
        return ft.train(recipe, precision="fp32", output=work / f"{name}-alone")


def assert_equal(alone: Run, run: Run, first: int = 1) -> None:
    """Losses, norms and weights within what a proof allows; metrics of steps and evaluations."""
    steps = range(first, STEPS + 1)
    wrong, _ = compare_steps(steps_of(alone.metrics), steps_of(run.metrics), steps, FP32)
    assert wrong == []
    assert weights_apart(alone, run, STEPS) <= FP32.weights
    for kind in ("train", "eval"):
        for theirs, mine in zip(alone.read_metrics(kind), run.read_metrics(kind), strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=FP32.loss)
            assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def judged(work: Path) -> Run:
    return train_alone(work, "kto")


def test_kto_on_divided_documents_learns_what_one_process_learns(work, judged, finetune):
    """The reference, the KL of each step, and answers that end on either process."""
    run = train(finetune, work, "kto", "cp")
    assert_equal(judged, run)
    assert_planned(run)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_divided_documents(work, judged, finetune):
    run = Run(work / "resumed")
    shutil.copytree(judged.root, run.root)
    shutil.rmtree(run.checkpoint(STEPS))
    shutil.rmtree(run.final)
    words = ("--backend", "sp", "--precision", "fp32", "--output", run.root)
    done = finetune("launch", work / "kto.json", *words, "--resume")
    assert done.status == 0, done.output
    assert_equal(judged, run, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "words"),
    [
        ("ipo-packed", "sp_fsdp", ()),
        ("dpo-lora", "sp_tp", ()),
        ("reward-lora", "sp", ()),
        ("classifier-packed", "cp", ()),
        ("dpo-packed", "cp", ("--rotation", "alltoall")),
    ],
)
def test_methods_learn_what_one_process_learns(name, backend, words, work, finetune):
    assert_equal(train_alone(work, name), train(finetune, work, name, backend, *words))


@pytest.mark.parametrize("ways", [1, 2, 3, 6])
def test_parts_of_a_row_have_all_labels_and_ends_of_its_documents(ways):
    """Labels of a document are predicted from the token before, which another part may have."""
    ends = (0, 3, 8, 9, 12)  # the last document is padding
    labels = torch.tensor(
        [[UNTRAINED, 1, 2, UNTRAINED, UNTRAINED, 5, 6, 7, UNTRAINED, *[-100] * 3]]
    )
    bounds = Boundaries(torch.zeros(1, 12), torch.tensor(ends), 5, ends)
    whole = MicroBatch(
        torch.arange(12)[None], labels, None, 2, 5, 9, bounds,
        document_labels=torch.tensor([2, 3, 0]), last_places=torch.tensor([2, 7, 8]),
        columns={"margin": torch.tensor([0.1, 0.2, 0.3])},
    )  # fmt: skip
    parts = [part(whole, rank, ways, None) for rank in range(ways)]
    shares = [each.divided for each in parts if each.divided is not None]
    assert torch.stack([each.labels for each in shares]).sum(0).tolist() == [2, 3, 0]
    assert [int(each.labels.sum()) for each in shares] == [each.trained_tokens for each in parts]
    lasts = {
        int(document): rank * 12 // ways + int(place)
        for rank, each in enumerate(shares)
        for document, place in zip(each.ended, each.last_places, strict=True)
    }
    assert lasts == {0: 2, 1: 7, 2: 8}
    # Each document counts on one process.
    owned = [(len(each.document_labels), len(each.columns["margin"])) for each in parts]
    assert owned == [(3, 3)] + [(0, 0)] * (ways - 1)
    assert sum(len(each.last_places) for each in parts) == 3
    with pytest.raises(FinetuneError, match="no process has all tokens of one"):
        token_logps(torch.nn.Identity(), parts[0])
