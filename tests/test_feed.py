"""Steps do not wait: rows are made ahead, and ranks meet once, whatever the step holds."""

import itertools
import json
import threading
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_command, warm_python, write_recipe
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.data.rows.collate import collate
from finetune.data.rows.prefetch import feed
from finetune.data.rows.store import Documents, Rows
from finetune.methods.sft import SFT
from finetune.recipe import Model
from finetune.runs.run import Run
from finetune.training import steps

CPU = torch.device("cpu")

COUNTING = """
import json, os, sys
import torch
from finetune.training import steps
from finetune.distributed.ranks import group_on_host
from finetune.distributed.heartbeat import collectives_begun

seen, step_of = [], steps.train_step
def counted(engine, *given):
    if not seen and os.environ["CONTROL"] == "gloo":  # as on a GPU
        engine.control = group_on_host(torch.device("cuda"))
    result = step_of(engine, *given)
    seen.append(collectives_begun())
    if engine.is_main:
        print("collectives", json.dumps(seen), flush=True)
    return result
steps.train_step = counted
from finetune.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs the command line and prints how many collectives were begun when each step was over."""


def test_the_next_step_is_made_while_this_one_runs():
    begun = [threading.Event() for _ in range(3)]

    def make(step: int) -> int:
        begun[step].set()
        return 10 * step

    with feed(make, 2, CPU) as rows:
        assert rows.take(0) == 0
        assert begun[1].wait(60)  # nobody has asked for it
        assert rows.take(1) == 10
    assert not begun[2].is_set()  # there is no such step


def test_a_feed_gives_any_step_it_is_asked_for():
    with feed(lambda step: 10 * step, 9, CPU) as rows:
        assert [rows.take(step) for step in (4, 5, 2, 8)] == [40, 50, 20, 80]


def test_what_fails_in_the_thread_is_raised_at_its_step_and_no_earlier():
    def make(step: int) -> int:
        if step == 1:
            raise OSError("the file was cut short")
        return step

    with feed(make, 5, CPU) as rows:
        assert rows.take(0) == 0
        with pytest.raises(OSError, match="the file was cut short"):
            rows.take(1)
        assert rows.take(2) == 2


def test_the_thread_of_a_feed_ends_with_it():
    before = threading.active_count()
    with feed(lambda step: step, 5, CPU) as rows:
        rows.take(0)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.parametrize(("packed", "free"), [(False, False), (False, True), (True, False)])
def test_terms_are_counted_without_the_micro_batches(packed, free):
    rng = np.random.default_rng(5)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 30, 40))])
    ids = rng.integers(0, 99, offsets[-1]).astype(np.int32)
    documents = Documents(ids, rng.random(len(ids)) < 0.5, offsets, np.zeros((40, 2), np.int64))
    bounds = np.arange(0, 41, 4) if packed else np.arange(41)
    rows = Rows(documents, rng.permutation(40), bounds, packed, free)
    recipe = SFT(model=Model("none"))
    chosen = rng.permutation(len(rows))[:7]
    batches = [collate(rows, part, 0, "cpu") for part in np.array_split(chosen, 3)]
    assert recipe.terms(rows, chosen) == sum(recipe.count(batch) for batch in batches)
    assert rows.lengths[chosen].sum() == sum(batch.real_tokens for batch in batches)


class OnHost(TorchFunctionMode):
    """Marks what was copied to the host, and what follows from it, and counts the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        copied = func.__name__ in ("cpu", "numpy", "tolist") and not is_on_host(given[0])
        self.copies += copied
        if copied or (given and all(map(is_on_host, given))):
            for each in tree_leaves(found):
                if isinstance(each, torch.Tensor):
                    each.on_host = True  # type: ignore[attr-defined]
        return found


class Read(TorchDispatchMode):
    """Counts operations on tensors of the device whose result depends on values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        reads = name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2")
        if name in ("index", "index_put_"):
            reads = any(each is not None and each.dtype == torch.bool for each in args[1])
        self.count += reads and not is_on_host(args[0])
        return func(*args, **(kwargs or {}))


def is_on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "on_host", False)


@pytest.mark.parametrize(
    ("sections", "equal"),
    [
        ({"adapter": {"r": 4}}, False),
        ({"packing": True}, False),
        ({"padding_free": False, "micro_rows": 4}, False),
        ({"padding_free": False, "micro_rows": 4}, True),
    ],
    ids=["side by side", "packs", "padded", "equally long"],
)
def test_a_step_waits_for_its_device_twice(tiny, train, tmp_path, monkeypatch, sections, equal):
    """For the norm of the gradient, and for the sums that are reported; counted on a CPU."""
    waits = list[int]()
    step_of = steps.train_step

    def counted(*given: Any) -> Any:
        with OnHost() as copied, Read() as read:
            result = step_of(*given)
        waits.append(copied.copies + read.count)
        return result

    monkeypatch.setattr(steps, "train_step", counted)
    asked = {"batch": sections} if "adapter" not in sections else dict(sections)
    if equal:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(8 * (tiny.data.read_text().splitlines()[0] + "\n"))
        asked["data"] = [{"source": str(rows), "format": "messages"}]
    train(precision="bf16", max_steps=2, **asked)
    assert waits == [2, 2]


@pytest.mark.parametrize("control", [pytest.param("default", marks=pytest.mark.slow), "gloo"])
def test_ranks_communicate_once_per_step_apart_from_the_gradient(tiny, tmp_path, control):
    never = {"saving": {"every": 99}, "evaluation": {"every": 99}}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=6, adapter={"r": 4}, **never))
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    words = f"{script} train {recipe} --precision fp32 --no-plot --output {tmp_path / 'run'}"
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    command = [warm_python(), *launcher.split(), *words.split()]
    variables = {"TORCH_FR_BUFFER_SIZE": "64", "CONTROL": control}
    done = run_command(command, tmp_path, env=variables, seconds=240).passed()
    told = [line for line in done.stdout.splitlines() if line.startswith("collectives ")]
    begun = json.loads(told[-1].removeprefix("collectives "))
    assert len(begun) == 6
    # From the fourth step on: the third is the first that follows the one whose memory is counted.
    # One all-reduce of the adapter's gradient, one meeting.
    assert [after - before for before, after in itertools.pairwise(begun[2:])] == [2] * 3
    assert len(list(Run(tmp_path / "run").read_metrics("train"))) == 6
