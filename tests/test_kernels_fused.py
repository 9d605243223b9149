"""Norms, gated units and rotations as one operation each train as those of transformers."""

import copy
import operator
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ROOT
from families import (
    FAMILIES,
    FP32,
    adapt,
    assert_as_near_to_fp32,
    assert_same_step,
    build,
    distance,
    in_bf16,
    step,
    whole_distance,
)
from torch import nn

from finetune import SFT, Data, Model, backend
from finetune.kernels import activation, chunked_loss, norm, pointwise, rotary
from finetune.kernels.cpu import attention, native
from finetune.models.model import FUSED, kernel_notes
from finetune.planner import plan
from finetune.planner.families import FAMILIES as KNOWN
from finetune.planner.kernels import choices

AS_EXACT = 1.3
"""Most that gradients in bf16 may be farther from fp32 than those of transformers in bf16 are."""
OPTIONS = {name: (fuse, kind) for name, (fuse, kind, _) in FUSED.items()}
ABSENT = {("mixtral", "activation")}
"""Experts are computed together, in a way of their own."""
CASES = [(kind, option) for kind in FAMILIES for option in OPTIONS if (kind, option) not in ABSENT]


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


@pytest.mark.parametrize("kind", [kind for kind, f in KNOWN.items() if f.logits and not f.reads])
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
    settled = plan(SFT(given).with_data(Data("a.jsonl", "messages")), "single", 1)
    model = build("qwen2_moe", **SIZED["qwen2_moe"])
    for fuse, _ in OPTIONS.values():
        fuse(model)
    assert [note for note in kernel_notes(model, settled) if "attention" not in note] == [
        "kernels.activation: fused, but plain in Qwen2MoeExperts, because those feed-forward "
        "layers are not supported"
    ]


ADAPTED = pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapter"])


@ADAPTED
@pytest.mark.parametrize(("kind", "option"), CASES)
def test_a_option_gives_the_loss_and_the_gradients_of_transformers(kind, option, adapted):
    plain = adapt(build(kind)) if adapted else build(kind)
    assert_same_step(fused(plain, option), plain)


@pytest.mark.parametrize(("kind", "option"), CASES)
def test_a_option_in_bf16_is_as_near_to_fp32_as_transformers(kind, option):
    plain = in_bf16(kind)
    most, measure = (1.2, distance) if option == "norm" else (AS_EXACT, whole_distance)
    assert_as_near_to_fp32(fused(plain, option), plain, most, measure)


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


def test_a_norm_keeps_its_input_and_a_number_a_row_and_a_gated_unit_gate_and_up():
    layer = build("llama").model.norm
    given = torch.randn(2, 5, 64, requires_grad=True)
    norm.fuse_norms(nn.ModuleList([layer]))
    assert kept(lambda: layer(given)) == [2 * 5 * 64, 2 * 5, 64]
    gate, up = (torch.randn(2, 5, 96, requires_grad=True) for _ in range(2))
    assert kept(lambda: activation.GatedUnit.apply(gate, up, False)) == [2 * 5 * 96] * 2


def test_a_rotation_keeps_the_tables_and_leaves_those_of_others_alone():
    query, key = (torch.randn(2, heads, 5, 16, requires_grad=True) for heads in (4, 2))
    tables = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    assert kept(lambda: rotary.rotate(query, key, *tables)) == [5 * 16] * 2
    first, second = build("llama"), build("llama")
    rotary.fuse_rotations(first)
    assert isinstance(first.model.layers[0].self_attn, rotary.FusedRotation)
    assert type(second.model.layers[0].self_attn).__bases__ == (nn.Module,)


ROWS = 30
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    native.reason_against(torch.float32) is not None, reason="there is no C compiler"
)


def check_chain(chain: pointwise.Chain, dtype: torch.dtype, *given: object) -> None:
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
        # One rounding to 8 bits, or 24; the norm rounds twice, as that of transformers does.
        rtol, atol = (1e-2, 1e-2) if dtype == torch.bfloat16 else (2e-5, 2e-6)
        close = {"rtol": rtol, "atol": atol, "check_dtype": False}
        torch.testing.assert_close(found, expected, **close)
        torch.testing.assert_close(inputs, exact, **close)  # what was written


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
    check_chain(rotary.rotated, dtype, heads, heads[:, :2], *tables)
    for flag in (False, True):  # of Gemma; of tanh; and whether there is a gradient
        for rows in (first, apart[1]):
            check_chain(norm.normed, dtype, rows, weight, 1e-5, flag)
        given = first, apart[0], inverse, weight, flag
        check_chain(norm.norm_gradients, dtype, *given, True, False)
        for gate, up, grad in ((first, second, third), apart):
            check_chain(activation.gated, dtype, gate, up, flag)
            check_chain(activation.gated_gradients, dtype, gate, up, grad, flag)
        check_chain(chunked_loss.tile_loss, dtype, first * 9, targets, None, 1.0, None, flag)
        check_chain(chunked_loss.tile_loss, dtype, first * 9, targets, bias, 0.3, 3.0, flag)
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
def test_nan_inputs_stay_nan(wrong):
    """The loop takes no step on it: no chain may hide it."""
    for dtype in (torch.float32, torch.bfloat16):
        given = torch.randn(3, 64).to(dtype)
        given[1, 5] = wrong
        others, targets = torch.ones(3, 64, dtype=dtype), torch.ones(3, dtype=torch.int64)
        for found in (
            native.normed(given, others[0], 1e-5, False),
            native.gated(given, others, False),
            native.gated(others, given, False),
            native.tile_loss(given.clone(), targets, None, 1.0, None, True),
        ):
            assert not (found if isinstance(found, torch.Tensor) else found[0]).isfinite().all()


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
@ADAPTED
@pytest.mark.parametrize("kind", FAMILIES)
def test_compiled_options_give_the_loss_and_the_gradients_of_transformers(kind, adapted, compiling):
    plain = adapt(build(kind)) if adapted else build(kind)
    ours = copy.deepcopy(plain)
    for fuse, _ in OPTIONS.values():
        fuse(ours)
    assert_same_step(ours, plain)


@needs_compiler
def test_what_was_compiled_is_kept_for_other_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    native._library.cache_clear()
    assert native.reason_against(torch.float32) is None
    native._library.cache_clear()
    (kept,) = (tmp_path / "compiled").iterdir()
    written = kept.stat().st_mtime_ns
    code = "import torch; from finetune.kernels.cpu.native import reason_against as r"
    command = [sys.executable, "-c", f"{code}; print(r(torch.float32))"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert (done.stdout, [kept]) == ("None\n", list((tmp_path / "compiled").iterdir()))
    assert kept.stat().st_mtime_ns == written


@needs_compiler
@pytest.mark.parametrize(
    ("asked", "tokens", "compiled"),
    [
        ("auto", pointwise.COMPILE_FROM["cpu"], True), ("eager", 10**9, False),
        ("auto", pointwise.COMPILE_FROM["cpu"] - 1, False), ("compiled", 1, True),
    ],
)  # fmt: skip
def test_what_is_compiled_follows_from_the_tokens_of_the_run(asked, tokens, compiled):
    found, note = pointwise.settle(asked, CPU, tokens, torch.float32)
    assert found == compiled
    said = f"kernels.pointwise: eager, for {tokens:,} tokens (compiled from"
    assert (note is None) == (asked == "eager")
    assert str(note).startswith(said) == (asked == "auto" and not compiled)


def test_without_a_compiler_chains_are_eager_with_a_note(monkeypatch, tmp_path):
    broken = tmp_path / "gcc"
    for path, reason in (
        ("nothing", "this machine has no C compiler"),
        (f"{tmp_path}:/bin", f"{broken} failed: no licence"),
    ):
        monkeypatch.setenv("PATH", path)
        native._library.cache_clear()
        found = pointwise.settle("compiled", CPU, 1, torch.float32)
        assert found == (False, f"kernels.pointwise: eager, because {reason}")
        broken.write_text("#!/bin/sh\necho no licence >&2\nexit 1\n")
        broken.chmod(0o755)
    native._library.cache_clear()
