"""Losses of a token other than its cross-entropy, and noise, on backends.

Their formulas: test_kernels_head, test_neftune.
"""

from typing import Any

import pytest
from conftest import Runs, Tiny, assert_same_losses, problems_of

import finetune as ft
from finetune import catalog

RULES: dict[str, dict[str, Any]] = {
    "eaft": {"token_weight": "eaft", "eaft_alpha": 0.5},
    "dft": {"token_weight": "dft"},
    "smoothed": {"label_smoothing": 0.2},
    "noise": {"model": {"neftune_alpha": 40.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["fsdp_full_shard", "zero3", "tp", "pp", "sp"])
def test_backends_have_the_losses_of_one_process(runs_of: Runs, tiny: Tiny, backend: str, rule):
    given: dict[str, Any] = {"batch": {"micro_rows": 4}, "max_steps": 3}
    recipes = {name: tiny.fields(**given, **sections) for name, sections in RULES.items()}
    assert_same_losses(*(runs_of(each, recipes)[rule] for each in ("single", backend)))


def test_a_plain_loss_and_one_that_weighs_it_exclude_each_other(tiny: Tiny):
    fields = tiny.fields(token_weight="dft", label_smoothing=0.1)
    (problem,) = problems_of(ft.plan, catalog.from_fields(fields), "single")
    assert problem.startswith("label_smoothing: 0.1, but dft weighs the plain loss")
    taught = tiny.fields(method="distill", teacher={"name": str(tiny.model)}, token_weight="eaft")
    (problem,) = problems_of(ft.plan, catalog.from_fields(taught), "single")
    assert problem.startswith("token_weight: distill compares two distributions")
