"""Norms, gated units and rotations as one operation each train as those of transformers."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from families import FAMILIES, adapt, build, distance, gradients, inputs, whole_distance
from torch import nn

from finetune import SFT, Data, Model, backend
from finetune.kernels import activation, chains, head, norm, rotary
from finetune.model import FUSED, kernel_notes
from finetune.planner import plan
from finetune.planner.kernels import LOGITS, choices

FP32 = 2e-6
"""Relative, of a loss and of the whole gradient: sums in another order move the seventh digit."""
BF16 = 4e-3
"""Relative, of a loss: bf16 keeps 8 bits, 0.4 %."""
AS_EXACT = 1.3
"""Most that gradients in bf16 may be farther from fp32 than those of transformers in bf16 are."""
LEVERS = {name: (fuse, kind) for name, (fuse, kind, _) in FUSED.items()}
ABSENT = {("mixtral", "activation")}
"""Experts are computed together, in a way of their own."""
CASES = [(kind, lever) for kind in FAMILIES for lever in LEVERS if (kind, lever) not in ABSENT]

Fuse = Callable[[nn.Module], None]


def step(model: nn.Module, autocast: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**inputs()).loss
    loss.backward()
    return loss.item(), gradients(model)


def fused(plain: nn.Module, lever: str) -> nn.Module:
    fuse, kind = LEVERS[lever]
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
    planned = {each.lever: each for each in choices(recipe, backend.load("single"), kind)}
    for lever, (fuse, known) in LEVERS.items():
        fuse(model)
        fuses = any(isinstance(module, known) for module in model.modules())
        assert planned[lever].value == ("fused" if fuses else "plain")
        assert bool(planned[lever].fallback) != fuses


def test_parts_that_stay_plain_beside_fused_ones_are_told() -> None:
    given = Model(config={"model_type": "qwen2_moe"}, tokenizer="t")
    recipe = SFT(given).with_data(Data("a.jsonl", "messages"))
    settled = plan(recipe, "single", 1)
    model = build("qwen2_moe", **SIZED["qwen2_moe"])
    for fuse, _ in LEVERS.values():
        fuse(model)
    assert kernel_notes(model, settled) == [
        "kernels.activation: fused, but plain in Qwen2MoeExperts, because those feed-forward "
        "layers are not known here"
    ]


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapter"])
@pytest.mark.parametrize(("kind", "lever"), CASES)
def test_a_lever_gives_the_loss_and_the_gradients_of_transformers(
    kind: str, lever: str, adapted: bool
) -> None:
    plain = adapt(build(kind)) if adapted else build(kind)
    expected, by_plain = step(copy.deepcopy(plain))
    loss, by_ours = step(fused(plain, lever))
    assert loss == pytest.approx(expected, rel=FP32)
    assert whole_distance(by_ours, by_plain) < FP32


@pytest.mark.parametrize(("kind", "lever"), CASES)
def test_a_lever_in_bf16_is_as_near_to_fp32_as_transformers(kind: str, lever: str) -> None:
    # Every expert: a rounded score would choose others.
    every = {"num_experts_per_tok": 4} if kind == "mixtral" else {}
    plain = adapt(build(kind, torch.bfloat16, **every))
    exact, by_exact = step(copy.deepcopy(plain).float())
    loss, by_ours = step(fused(plain, lever), autocast=True)
    _, by_plain = step(plain, autocast=True)
    assert loss == pytest.approx(exact, rel=BF16)
    measure, most = (distance, 1.2) if lever == "norm" else (whole_distance, AS_EXACT)
    assert measure(by_ours, by_exact) < most * measure(by_plain, by_exact)


OTHERS = [(kind, lever) for kind in ("qwen2", "granite", "gemma", "smollm3") for lever in LEVERS]


@pytest.mark.parametrize(("kind", "lever"), [*OTHERS, ("phi3", "norm")])
def test_other_known_parts_are_the_formula(kind: str, lever: str) -> None:
    plain = build(kind)
    loss = step(copy.deepcopy(plain))[0]
    assert step(fused(plain, lever))[0] == pytest.approx(loss, rel=FP32)
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


def check_chain(chain: chains.Chain, *given: object) -> None:
    """Compiled for any number of rows, a chain computes what it does eagerly."""
    for rows in (12, 7, ROWS):
        inputs, eager = (
            [
                (each[:rows] if len(each) == ROWS else each).clone()
                if isinstance(each, torch.Tensor)
                else each
                for each in given
            ]
            for _ in range(2)
        )
        torch.testing.assert_close(chain(*inputs), chain.eager(*eager), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(inputs, eager, rtol=1e-5, atol=1e-5)  # what was written there


@pytest.mark.slow
@pytest.mark.usefixtures("compiling")
def test_compiled_chains_compute_the_same() -> None:
    if reason := chains.reason_against(torch.device("cpu")):
        pytest.skip(reason)
    torch.manual_seed(0)
    first, second, third = (torch.randn(ROWS, 64) for _ in range(3))
    weight, inverse = torch.randn(64), torch.rand(ROWS, 1) + 0.5
    heads, tables = torch.randn(ROWS, 4, 16), [torch.randn(ROWS, 1, 16) for _ in range(2)]
    targets = torch.randint(0, 64, (ROWS,))
    check_chain(norm.normed, first, weight, 1e-5, False)
    check_chain(norm.norm_gradients, first, second, inverse, weight, True, True, True)
    check_chain(activation.gated, first, second, False)
    check_chain(activation.gated_gradients, first, second, third, True)
    check_chain(rotary.rotated, heads, heads[:, :2], *tables)
    check_chain(head.tile_loss, first, targets, None, 1.0, 3.0, True)


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
    if reason := chains.reason_against(torch.device("cpu")):
        pytest.skip(reason)
    found, note = chains.settle(asked, torch.device("cpu"), tokens)
    assert found == compiled
    said = f"kernels.pointwise: eager, for {tokens:,} tokens in each process (compiled from"
    assert (note is None) == (asked == "eager")
    assert str(note).startswith(said) == (asked == "auto" and not compiled)


def test_without_a_compiler_chains_are_eager_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    compiled, note = chains.settle("compiled", torch.device("cpu"), 1)
    assert not compiled
    assert note == "kernels.pointwise: eager, because this machine has no C++ compiler"
