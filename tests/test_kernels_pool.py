"""Memory of large tensors: a pool that is one piece again when all of them are gone."""

import gc
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from conftest import write_recipe
from torch.profiler import ProfilerActivity, profile

from finetune.kernels.cpu import pool
from finetune.runs.run import Run
from finetune.training import memory_meter

needs_pool = pytest.mark.skipif(
    pool.reason_against() is not None, reason=f"no pool: {pool.reason_against()}"
)
LARGE = 2**16
"""Bytes from which a tensor is pooled."""


@pytest.fixture
def pooled() -> Iterator[None]:
    if reason := pool.reason_against():
        pytest.skip(f"no pool: {reason}")
    gc.collect()  # models of earlier tests in cycles
    assert pool.handed_out() == 0
    pool.use_pool(True)
    yield
    pool.use_pool(False)


def tensor(size: int, fill: int | None = None) -> torch.Tensor:
    made = torch.empty(size, dtype=torch.uint8)
    return made if fill is None else made.fill_(fill)


def span(tensors: list[torch.Tensor]) -> tuple[int, int]:
    return min(t.data_ptr() for t in tensors), max(t.data_ptr() + t.nbytes for t in tensors)


def test_only_large_tensors_are_pooled(pooled: None) -> None:
    small = tensor(LARGE - 1)
    assert pool.handed_out() == 0
    large = tensor(LARGE)
    assert pool.handed_out() == LARGE
    pool.use_pool(False)
    other = tensor(LARGE)
    assert pool.handed_out() == LARGE
    del large  # gives back what it took, though nothing is pooled now
    assert pool.handed_out() == 0
    del small, other


def test_a_block_is_taken_again_and_gaps_that_meet_become_one(pooled: None) -> None:
    first, second, third, last = (tensor(LARGE) for _ in range(4))
    start, end = span([first, second, third, last])
    assert end - start == 4 * LARGE
    places = [t.data_ptr() - start for t in (first, second, third, last)]
    assert places == [0, LARGE, 2 * LARGE, 3 * LARGE]
    del first, third
    again = tensor(LARGE)
    assert again.data_ptr() in (start, start + 2 * LARGE)
    del again, second  # three in a row are free
    whole = tensor(3 * LARGE)
    assert whole.data_ptr() == start
    del whole, last
    assert tensor(64 * LARGE).data_ptr() == start


def test_what_no_tensor_holds_goes_back_to_the_system(pooled: None) -> None:
    def resident() -> int:
        return psutil.Process().memory_info().rss

    before = resident()
    kept, gone = tensor(2**24, 1), tensor(2**27, 2)
    assert resident() - before > 2**27
    del gone
    assert resident() - before > 2**27  # the next step uses it again
    pool.use_pool(False)
    assert resident() - before < 2**25
    assert bool((kept == 1).all())
    pool.use_pool(True)
    assert bool((tensor(2**27) == 0).all())  # pages that are new


def test_blocks_never_overlap_whatever_comes_and_goes(pooled: None) -> None:
    """Each tensor keeps what was written to it; in the end one gap is left, which is the whole."""
    rng = random.Random(0)
    held: list[tuple[torch.Tensor, int]] = []
    start = tensor(LARGE).data_ptr()
    most = highest = 0
    for number in range(3_000):
        if held and rng.random() < 0.5:
            made, fill = held.pop(rng.randrange(len(held)))
            assert made[0] == made[-1] == made[made.numel() // 2] == fill
            del made
        else:
            size = rng.choice([LARGE, 3 * LARGE + 1, rng.randint(LARGE, 40 * LARGE)])
            held.append((tensor(size, number % 251), number % 251))
            highest = max(highest, held[-1][0].data_ptr() + size - start)
        most = max(most, pool.handed_out())
        assert sum(t.nbytes for t, _ in held) <= pool.handed_out()
    assert pool.handed_out() <= 1.05 * sum(t.nbytes for t, _ in held)  # rounded by a 32nd at most
    assert highest < 1.5 * most
    places = sorted(span([t]) for t, _ in held)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(places))
    held.clear()
    assert (pool.handed_out(), tensor(most).data_ptr()) == (0, start)


def test_threads_take_and_give_back_at_once(pooled: None) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            if not bool((tensor(rng.randint(LARGE, 4 * LARGE), seed) == seed).all()):
                wrong.append(seed)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert (wrong, pool.handed_out()) == ([], 0)


def test_storages_grow_and_empty_themselves_as_fsdp_does(pooled: None) -> None:
    made = tensor(LARGE, 7)
    storage = made.untyped_storage()
    storage.resize_(4 * LARGE)
    assert pool.handed_out() == 4 * LARGE
    assert bool((made == 7).all())
    storage.resize_(0)
    assert pool.handed_out() == 0


def test_the_meter_counts_blocks_and_the_profiler_sees_them_come_and_go(pooled: None) -> None:
    assert pool.keep_sizes()
    before = memory_meter.allocated()
    old = tensor(2**24)
    assert memory_meter.allocated() - before == 2**24
    plain, pooled_bytes = memory_meter._totals()
    how = {"activities": [ProfilerActivity.CPU], "profile_memory": True}
    with profile(**how) as profiled:
        del old
        first, second = tensor(2**23), tensor(2**22)
        del first, second
    # The old block goes first: never is there more than in the beginning.
    assert memory_meter._highest(profiled, (plain, pooled_bytes)) == plain + 2**24
    with profile(**how) as profiled:
        first, second = tensor(2**23), tensor(2**22)
        del first, second
    assert memory_meter._highest(profiled, (plain, 0)) == plain + 2**23 + 2**22


def test_a_process_that_forks_has_a_pool_in_both(pooled: None) -> None:
    made = tensor(LARGE, 3)
    child = os.fork()
    if not child:
        fine = bool((made == 3).all()) and bool((tensor(4 * LARGE, 5) == 5).all())
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((made == 3).all())


def test_failed_allocations_are_reported_as_by_pytorch(pooled: None) -> None:
    size = 2 * pool.RESERVED * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        tensor(size)
    assert pool.handed_out() == 0


STEPS = """
import sys, torch
from finetune.kernels.cpu import pool
pool.use_pool(sys.argv[1] == "pooled")
small = []
for step in range(12):
    held = []
    for number in range(12):
        held.append(torch.ones(2**20 + 4_096 * ((step * 7 + number * 5) % 13)))
        small.append(torch.ones(64))  # as code that is kept for a shape
    del held
faults = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[7])
print(faults)
"""


@needs_pool
def test_steps_use_the_memory_of_those_before_them() -> None:
    """Without the pool, tensors of changing sizes take pages that are new to the process."""

    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", STEPS, how],
            capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return int(done.stdout)

    assert faults("pooled") + 50 * 2**20 / 4096 < faults("plain")  # a step has 48 MiB


@needs_pool
@pytest.mark.parametrize(
    ("asked", "tokens", "device", "found", "note"),
    [
        ("auto", 10_000, "cpu", True, "pooled, for 10,000 tokens"),
        ("auto", 9_999, "cpu", False, "plain, for 9,999 tokens (pooled from 10,000 on)"),
        ("pooled", 1, "cpu", True, "pooled, for 1 tokens"),
        ("plain", 10**9, "cpu", False, None),
        ("auto", 10**9, "cuda", False, None),
    ],
)
def test_what_is_pooled_follows_from_the_tokens_of_the_run(asked, tokens, device, found, note):
    expected = (found, note and f"kernels.allocator: {note}")
    assert pool.settle(asked, torch.device(device), tokens) == expected


def test_without_a_compiler_malloc_is_used_with_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code = (
        "import torch; from finetune.kernels.cpu import pool;"
        "print(*pool.settle('auto', torch.device('cpu'), 10**6)); pool.use_pool(False);"
        "print(pool.handed_out())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "False kernels.allocator: plain, because this machine has no C++ compiler",
        "0",
    ]


@needs_pool
@pytest.mark.parametrize(
    "backend", ["single", pytest.param("fsdp_full_shard", marks=pytest.mark.slow)]
)
def test_a_pool_changes_no_digit_of_what_is_learned(tiny, finetune, tmp_path, backend):
    losses: dict[str, list[float]] = {}
    for how in ("plain", "pooled"):
        fields = tiny.fields(adapter={"r": 4}, kernels={"allocator": how, "pointwise": "eager"})
        recipe = write_recipe(tmp_path / f"{how}.json", fields)
        verb = ["train", recipe] if backend == "single" else ["launch", recipe, "--processes", "2"]
        words = ("--backend", backend, "--precision", "fp32", "--output", tmp_path / how)
        done = finetune(*verb, *words).passed()
        assert ("kernels.allocator: pooled" in done.output) == (how == "pooled")
        losses[how] = [step["loss"] for step in Run(tmp_path / how).read_metrics("train")]
    assert losses["plain"] == losses["pooled"]
    assert len(losses["plain"]) == 6
