"""Norms, gated units and rotations as one operation each train as those of transformers."""

import copy
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from families import FAMILIES, adapt, build, distance, gradients, inputs, whole_distance
from torch import nn

from finetune import SFT, Data, Model, backend
from finetune.kernels import activation, chains, chunked_loss, norm, rotary
from finetune.kernels.cpu import attention, native
from finetune.models.model import FUSED, kernel_notes
from finetune.planner import plan
from finetune.planner.kernels import LOGITS, choices

FP32 = 2e-6
"""Relative, of a loss and of the whole gradient: sums in another order move the seventh digit."""
BF16 = 4e-3
"""Relative, of a loss: bf16 keeps 8 bits, 0.4 %."""
AS_EXACT = 1.3
"""Most that gradients in bf16 may be farther from fp32 than those of transformers in bf16 are."""
OPTIONS = {name: (fuse, kind) for name, (fuse, kind, _) in FUSED.items()}
ABSENT = {("mixtral", "activation")}
"""Experts are computed together, in a way of their own."""
CASES = [(kind, option) for kind in FAMILIES for option in OPTIONS if (kind, option) not in ABSENT]

Fuse = Callable[[nn.Module], None]


def step(model: nn.Module, autocast: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**inputs()).loss
    loss.backward()
    return loss.item(), gradients(model)


def fused(plain: nn.Module, option: str) -> nn.Module:
    fuse, kind = OPTIONS[option]
    given = copy.deepcopy(plain)
    fuse(given)
    assert any(isinstance(module, kind) for module in given.modules())
    return given


SIZED = {
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}  # fmt: skip


@pytest.mark.parametrize("kind", LOGITS)
def test_the_plan_knows_which_parts_of_a_type_are_known_here(kind: str) -> None:
    model = build(kind, **SIZED.get(kind, {}))
    recipe = SFT(Model(config={"model_type": kind}))
    planned = {each.option: each for each in choices(recipe, backend.load("single"), kind)}
    for option, (fuse, known) in OPTIONS.items():
        fuse(model)
        fuses = any(isinstance(module, known) for module in model.modules())
        assert planned[option].value == ("fused" if fuses else "plain")
        assert bool(planned[option].fallback) != fuses


def test_parts_without_fused_kernels_are_reported() -> None:
    given = Model(config={"model_type": "qwen2_moe"}, tokenizer="t")
    recipe = SFT(given).with_data(Data("a.jsonl", "messages"))
    settled = plan(recipe, "single", 1)
    model = build("qwen2_moe", **SIZED["qwen2_moe"])
    for fuse, _ in OPTIONS.values():
        fuse(model)
    assert kernel_notes(model, settled) == [
        "kernels.activation: fused, but plain in Qwen2MoeExperts, because those feed-forward "
        "layers are not supported"
    ]


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapter"])
@pytest.mark.parametrize(("kind", "option"), CASES)
def test_a_option_gives_the_loss_and_the_gradients_of_transformers(
    kind: str, option: str, adapted: bool
) -> None:
    plain = adapt(build(kind)) if adapted else build(kind)
    expected, by_plain = step(copy.deepcopy(plain))
    loss, by_ours = step(fused(plain, option))
    assert loss == pytest.approx(expected, rel=FP32)
    assert whole_distance(by_ours, by_plain) < FP32


@pytest.mark.parametrize(("kind", "option"), CASES)
def test_a_option_in_bf16_is_as_near_to_fp32_as_transformers(kind: str, option: str) -> None:
    # Every expert: a rounded score would choose others.
    every = {"num_experts_per_tok": 4} if kind == "mixtral" else {}
    plain = adapt(build(kind, torch.bfloat16, **every))
    exact, by_exact = step(copy.deepcopy(plain).float())
    loss, by_ours = step(fused(plain, option), autocast=True)
    _, by_plain = step(plain, autocast=True)
    assert loss == pytest.approx(exact, rel=BF16)
    measure, most = (distance, 1.2) if option == "norm" else (whole_distance, AS_EXACT)
    assert measure(by_ours, by_exact) < most * measure(by_plain, by_exact)


OTHERS = [(kind, option) for kind in ("qwen2", "granite", "gemma", "smollm3") for option in OPTIONS]


@pytest.mark.parametrize(("kind", "option"), [*OTHERS, ("phi3", "norm")])
def test_other_known_parts_are_the_formula(kind: str, option: str) -> None:
    plain = build(kind)
    loss = step(copy.deepcopy(plain))[0]
    assert step(fused(plain, option))[0] == pytest.approx(loss, rel=FP32)
    names = {type(m).__name__ for m in plain.modules() if "Norm" in type(m).__name__}
    assert names <= norm.NORMS.keys()


def kept(work: Callable[[], object]) -> list[int]:
    """Elements of what autograd saves."""
    found: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return found


def test_a_norm_keeps_its_input_and_a_number_a_row() -> None:
    layer = build("llama").model.norm
    given = torch.randn(2, 5, 64, requires_grad=True)
    norm.fuse_norms(nn.ModuleList([layer]))
    assert kept(lambda: layer(given)) == [2 * 5 * 64, 2 * 5, 64]


def test_a_gated_unit_keeps_gate_and_up() -> None:
    gate, up = (torch.randn(2, 5, 96, requires_grad=True) for _ in range(2))
    assert kept(lambda: activation.GatedUnit.apply(gate, up, False)) == [2 * 5 * 96] * 2


def test_a_rotation_keeps_the_tables_and_leaves_those_of_others_alone() -> None:
    query, key = (torch.randn(2, heads, 5, 16, requires_grad=True) for heads in (4, 2))
    tables = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    assert kept(lambda: rotary.rotate(query, key, *tables)) == [5 * 16] * 2
    first, second = build("llama"), build("llama")
    rotary.fuse_rotations(first)
    assert isinstance(first.model.layers[0].self_attn, rotary.FusedRotation)
    assert type(second.model.layers[0].self_attn).__bases__ == (nn.Module,)


@pytest.fixture
def compiling() -> Iterator[None]:
    chains.compile_chains(True)
    yield
    chains.compile_chains(False)


ROWS = 30
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    native.reason_against(torch.float32) is not None, reason="there is no C compiler"
)


def check_chain(chain: chains.Chain, dtype: torch.dtype, *given: object) -> None:
    """In C, a chain computes for any rows and any distance between them what it does eagerly."""

    def some(each: object, rows: int, wide: torch.dtype) -> object:
        if not isinstance(each, torch.Tensor):
            return each
        cut = each[:rows] if len(each) == ROWS else each
        return cut.to(dtype).to(wide) if each.is_floating_point() else cut

    for rows in (1, 7, ROWS):
        inputs = [some(each, rows, dtype) for each in given]
        # Without the roundings between operations, which the C does not have.
        exact = copy.deepcopy([some(each, rows, torch.float32) for each in given])
        found, expected = chain.in_c(*inputs), chain.eager(*exact)
        assert found is not None
        # One rounding to 8 bits, or 24; the norm rounds twice, as that of transformers does.
        close = (
            {"rtol": 1e-2, "atol": 1e-2}
            if dtype == torch.bfloat16
            else {"rtol": 2e-5, "atol": 2e-6}
        )
        torch.testing.assert_close(found, expected, check_dtype=False, **close)
        torch.testing.assert_close(inputs, exact, check_dtype=False, **close)  # what was written


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [64, 50, 5])
def test_chains_in_c_compute_the_same(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    first, second, third = (torch.randn(ROWS, width) for _ in range(3))
    apart = torch.randn(ROWS, 3 * width).chunk(3, 1)
    weight, inverse = torch.randn(width), torch.rand(ROWS, 1) + 0.5
    heads, tables = torch.randn(ROWS, 4, 16), [torch.randn(ROWS, 1, 16) for _ in range(2)]
    targets, bias = torch.randint(0, width, (ROWS,)), torch.randn(width)
    for gemma in (False, True):
        check_chain(norm.normed, dtype, first, weight, 1e-5, gemma)
        check_chain(norm.normed, dtype, apart[1], weight, 1e-5, gemma)
        check_chain(
            norm.norm_gradients, dtype, first, apart[0], inverse, weight, gemma, True, False
        )
    for tanh in (False, True):
        check_chain(activation.gated, dtype, first, second, tanh)
        check_chain(activation.gated, dtype, *apart[:2], tanh)
        check_chain(activation.gated_gradients, dtype, first, second, third, tanh)
        check_chain(activation.gated_gradients, dtype, *apart, tanh)
    check_chain(rotary.rotated, dtype, heads, heads[:, :2], *tables)
    for wanted in (False, True):
        check_chain(chunked_loss.tile_loss, dtype, first * 9, targets, None, 1.0, None, wanted)
        check_chain(chunked_loss.tile_loss, dtype, first * 9, targets, bias, 0.3, 3.0, wanted)
    # Without the gradient, the eager twin uses up the logits and the C leaves them.
    for given in ((None, 1.0, None), (bias, 0.3, 3.0)):
        logits = 3 * first
        check_chain(chunked_loss.tile_loss, dtype, logits, targets, *given, True, True)
        alone = chunked_loss.tile_loss.in_c(logits.to(dtype), targets, *given, False, True)
        both = chunked_loss.tile_loss.in_c(logits.to(dtype), targets, *given, True, True)
        assert torch.equal(alone, both)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_a_traced_tile_of_logits_is_not_written_twice(cap: float | None, entropy: bool) -> None:
    """TorchInductor would keep the tile in fp32 for an indexed write; the values are equal."""
    called: list[Any] = []

    def as_it_is(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        called.extend(node.target for node in graph.graph.nodes)
        return graph

    logits, targets = torch.randn(5, 40), torch.randint(0, 40, (5,))
    traced, eager = logits.clone(), logits.clone()
    compiled = torch.compile(chunked_loss.tile_loss.eager, backend=as_it_is)
    given = targets, None, 0.5, cap, True, entropy
    assert torch.equal(compiled(traced, *given), chunked_loss.tile_loss.eager(eager, *given))
    assert torch.equal(traced, eager)
    assert torch.where in called
    assert operator.setitem not in called


@needs_compiler
@pytest.mark.parametrize(("first", "length"), [(0, 1), (0, 5), (0, 100), (384, 1), (384, 100)])
@pytest.mark.parametrize("groups", [1, 3])
def test_shares_in_c_are_those_of_the_mask(first: int, length: int, groups: int) -> None:
    shape = (2, length * groups, first + length)
    scores, grads = torch.randn(shape) * 5, torch.randn(shape)
    seen = torch.arange(shape[2]) <= first + torch.arange(shape[1])[:, None] // groups
    hidden = torch.where(seen, scores * 0.125, -torch.inf)
    logs = hidden.logsumexp(-1, keepdim=True) + 0.01  # of scores before they were rounded
    found = native.share_gradients(scores.clone(), grads.clone(), logs, groups, 0.125)
    assert found is not None
    expected = attention.share_gradients.eager(scores.clone(), grads.clone(), logs, groups, 0.125)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert not ours[:, ~seen].any()


@needs_compiler
def test_several_threads_compute_the_same_bits() -> None:
    first, second = torch.randn(600, 500), torch.randn(600, 500)
    targets, threads = torch.randint(0, 500, (600,)), torch.get_num_threads()

    def all_of_it() -> tuple[object, ...]:
        logits = first.clone()
        loss = native.tile_loss(logits, targets, None, 1.0, None, True)
        unit = native.gated(first, second, False)
        return logits, loss, unit, native.normed(first, second[0], 1e-5, False)

    try:
        torch.set_num_threads(1)
        alone = all_of_it()
        torch.set_num_threads(2)
        torch.testing.assert_close(all_of_it(), alone, rtol=0, atol=0)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_inputs_stay_nan(wrong: float) -> None:
    """The loop takes no step on it: no chain may hide it."""
    for dtype in (torch.float32, torch.bfloat16):
        given = torch.randn(3, 64).to(dtype)
        given[1, 5] = wrong
        others = torch.ones(3, 64, dtype=dtype)
        found = (
            native.normed(given, others[0], 1e-5, False),
            native.gated(given, others, False),
            native.gated(others, given, False),
            native.tile_loss(
                given.clone(), torch.ones(3, dtype=torch.int64), None, 1.0, None, True
            ),
        )
        for each in found:
            assert each is not None
            result = each if isinstance(each, torch.Tensor) else each[0]
            assert not result.isfinite().all()


@needs_compiler
def test_tensors_that_the_c_is_not_for_are_computed_eagerly(compiling: None) -> None:
    half, wide = torch.randn(4, 8).half(), torch.randn(4, 8).bfloat16()
    assert native.gated(half, half, False) is None
    assert torch.equal(
        activation.gated(half, half, False), activation.gated.eager(half, half, False)
    )
    assert native.normed(wide, torch.ones(8), 1e-5, False) is None  # its result is of 32 bits
    assert native.gated(wide[:0], wide[:0], False) is None
    gradients = norm.norm_gradients(wide, wide, torch.ones(4, 1), wide[0], False, True, True)
    assert all(each is not None for each in gradients)


@needs_compiler
@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapter"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_compiled_options_give_the_loss_and_the_gradients_of_transformers(
    kind: str, adapted: bool, compiling: None
) -> None:
    plain = adapt(build(kind)) if adapted else build(kind)
    ours = copy.deepcopy(plain)
    for fuse, _ in OPTIONS.values():
        fuse(ours)
    expected, by_plain = step(plain)
    loss, by_ours = step(ours)
    assert loss == pytest.approx(expected, rel=FP32)
    assert whole_distance(by_ours, by_plain) < FP32


@needs_compiler
def test_what_was_compiled_is_kept(tmp_path: Path) -> None:
    script = (
        "import time, torch; from finetune.kernels.cpu import native; begun = time.perf_counter()\n"
        "print(native.reason_against(torch.float32), time.perf_counter() - begun)"
    )

    def seconds() -> float:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=True,
            env=os.environ | {"FINETUNE_CACHE": str(tmp_path)},
        )  # fmt: skip
        said, taken = done.stdout.split()
        assert said == "None"
        return float(taken)

    first = seconds()
    (kept,) = (tmp_path / "compiled").iterdir()
    written = kept.stat().st_mtime_ns
    assert seconds() < first
    assert kept.stat().st_mtime_ns == written


@needs_compiler
@pytest.mark.parametrize(
    ("asked", "tokens", "compiled"),
    [
        ("auto", chains.COMPILE_FROM["cpu"], True),
        ("auto", chains.COMPILE_FROM["cpu"] - 1, False),
        ("eager", 10**9, False),
        ("compiled", 1, True),
    ],
)
def test_what_is_compiled_follows_from_the_tokens_of_the_run(
    asked: str, tokens: int, compiled: bool
) -> None:
    found, note = chains.settle(asked, CPU, tokens, torch.float32)
    assert found == compiled
    said = f"kernels.pointwise: eager, for {tokens:,} tokens (compiled from"
    assert (note is None) == (asked == "eager")
    assert str(note).startswith(said) == (asked == "auto" and not compiled)


def test_without_a_compiler_chains_are_eager_with_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path, reason in (
        (tmp_path / "nothing", "this machine has no C compiler"),
        (tmp_path / "broken", f"{tmp_path}/broken/gcc failed: no licence"),
    ):
        path.mkdir()
        if path.name == "broken":
            (path / "gcc").write_text("#!/bin/sh\necho no licence >&2\nexit 1\n")
            (path / "gcc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{path}:/bin" if path.name == "broken" else str(path))
        native._library.cache_clear()
        compiled, note = chains.settle("compiled", CPU, 1, torch.float32)
        assert not compiled
        assert note == f"kernels.pointwise: eager, because {reason}"
    native._library.cache_clear()
