"""Methods on documents whose tokens several processes share: the same numbers as one process."""

from typing import Any

import pytest
import torch
from conftest import Tiny, Train, cut_off, launch
from divided import assert_learned, assert_planned, processes_of, sources_of

import finetune as ft
from finetune.data.rows.collate import UNTRAINED, Boundaries, MicroBatch
from finetune.distributed.sequence import part
from finetune.methods.losses import token_logps
from finetune.verification.proofs.matrix import FP32

STEPS = 2
OF_METHODS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "sft_weight": 0.1},
    "ipo": {"method": "dpo", "loss_type": "ipo", "beta": 0.3},
    "kto": {"beta": 0.3},
    "classifier": {"labels": ["a", "b"]},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    return sources_of(tmp_path_factory.mktemp("documents"), 32)


def fields_of(name: str, tiny: Tiny, sources: dict[str, Any]) -> dict[str, Any]:
    """A recipe of a method: with all weights, with `-lora`, or `-packed`."""
    name, _, way = name.partition("-")
    changes = {"method": name} | OF_METHODS[name]
    rows = {"kto": "kto", "classifier": "labelled"}.get(changes["method"], "preference")
    # KTO takes one row at a time, so that some parts have no label.
    batch = {"rows": 8, "micro_rows": 1 if name == "kto" else 2, "max_length": 128}
    if way == "packed":
        batch |= {"packing": True, "micro_rows": 1, "rows": 4}
    return {
        "model": {"name": str(tiny.model)},
        "data": [sources[rows]],
        "eval_rows": 5,
        "batch": batch,
        "adapter": {"r": 4, "targets": "all-linear"} if way == "lora" else None,
        "optim": {"lr": 1e-3, "warmup": 0, "max_grad_norm": 0.5},
        "saving": {"every": 1},
        "evaluation": {"every": STEPS},
        "data_checks": "report",
        "max_steps": STEPS,
    } | changes


def assert_equal(alone: ft.Run, run: ft.Run, first: int = 1) -> None:
    """What was learned; losses and metrics of steps and evaluations."""
    assert_learned(alone, run, first, STEPS)
    for kind in ("train", "eval"):
        for theirs, mine in zip(alone.read_metrics(kind), run.read_metrics(kind), strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=FP32.loss)
            assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def judged(run_of: Train, tiny: Tiny, sources: dict[str, Any]) -> ft.Run:
    return run_of(fields=fields_of("kto", tiny, sources))


@pytest.mark.slow
def test_kto_on_divided_documents_learns_what_one_process_learns(run_of, tiny, sources, judged):
    """The reference, the KL of each step, and answers that end on either process."""
    run = run_of("cp", fields=fields_of("kto", tiny, sources))
    assert_equal(judged, run)
    assert_planned(run)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_divided_documents(judged, tmp_path, finetune):
    run = cut_off(judged, tmp_path / "run", 1)
    launch(finetune, judged.recipe, "sp", run.root, "--resume")
    assert_equal(judged, run, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "words"),
    [
        ("ipo-packed", "sp_fsdp", ()),
        ("dpo-lora", "sp_tp", ()),
        ("classifier-packed", "cp", ()),
        ("dpo-packed", "cp", ("--rotation", "alltoall")),
    ],
)
def test_methods_learn_what_one_process_learns(name, backend, words, train, run_of, tiny, sources):
    fields = fields_of(name, tiny, sources)
    run = run_of(backend, *words, processes=processes_of(backend), fields=fields)
    assert_equal(train(fields=fields), run)


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
    with pytest.raises(ft.FinetuneError, match="no process has all tokens of one"):
        token_logps(torch.nn.Identity(), parts[0])
