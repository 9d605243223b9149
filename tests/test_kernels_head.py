"""The loss in chunks is that of transformers, with all gradients, for every kind of head."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, VOCABULARY, adapt, build, distance, gradients, inputs
from peft import PeftModel
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributions import Categorical
from torch.utils.flop_counter import FlopCounterMode

from finetune.data.rows.collate import MicroBatch
from finetune.errors import FinetuneError
from finetune.kernels import head
from finetune.kernels.chunked_loss import ChunkedLogProbs
from finetune.kernels.pointwise import Chain
from finetune.kernels.token_loss import TokenLoss
from finetune.methods.losses import _token_values, sequence_logps, token_logps, token_loss_sum
from finetune.planner.families import FAMILIES as KNOWN
from finetune.planner.kernels import CHUNK_ENTRIES, TILE_ENTRIES
from finetune.verification.memory.tracker import OTHER, Tracker

FP32, BF16 = 2e-6, 4e-3
"""Relative, of a loss: a sum in another order moves the seventh digit, and bf16 keeps 8 bits."""
AS_EXACT = 1.2
"""Most that gradients in bf16 may be farther from fp32 than those of transformers in bf16 are."""
OTHERS = {
    "granite": {"logits_scaling": 2.5},
    "cohere": {"logit_scale": 0.3},
    "gemma3_text": {"head_dim": 16, "final_logit_softcapping": 4.0},
}
SCALE = 0.37
"""The loop multiplies every sum before the backward pass."""


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ENTRIES", 7 * VOCABULARY)
    monkeypatch.setattr(head, "TILE_ENTRIES", 3 * VOCABULARY)


def batch() -> MicroBatch:
    given = inputs()
    return MicroBatch(
        given["input_ids"], given["labels"], given["attention_mask"], 3,
        int((given["labels"] != -100).sum()), int(given["attention_mask"].sum()),
    )  # fmt: skip


Found = tuple[float, dict[str, torch.Tensor]]
AUTOCAST = pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
WHOLE = ("llama", "gemma2", *OTHERS)
"""Types whose heads differ: a plain one, with a cap, and with a scale."""
HEADS = pytest.mark.parametrize(
    ("kind", "chunked"),
    [*((kind, True) for kind in (*FAMILIES, *OTHERS)), *((kind, False) for kind in WHOLE)],
)
CHUNKED = pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])


def with_loss(plain: nn.Module, chunked: bool = True) -> nn.Module:
    """A copy with our loss."""
    given = copy.deepcopy(plain)
    base = given.get_base_model() if isinstance(given, PeftModel) else given
    head.give_loss(base, chunked)
    return given


def reference(model: nn.Module, autocast: bool) -> Found:
    """Plain transformers: logits of every row, one cross-entropy in fp32."""
    given = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=given.ids, attention_mask=given.attention_mask).logits
    flat = logits[:, :-1].float().flatten(0, 1)
    loss = F.cross_entropy(flat, given.labels[:, 1:].flatten(), reduction="sum")
    (loss * SCALE).backward()
    return loss.item(), gradients(model)


def ours(model: nn.Module, autocast: bool) -> Found:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = token_loss_sum(model, batch())
    (loss * SCALE).backward()
    return loss.item(), gradients(model)


def compare(plain: nn.Module, given: nn.Module, autocast: bool) -> None:
    """In fp32 both are equal; in bf16 they are equally far from fp32."""
    exact, by_exact = reference(copy.deepcopy(plain).float(), False)
    loss, by_ours = ours(given, autocast)
    if not autocast:
        assert loss == pytest.approx(exact, rel=FP32)
        assert distance(by_ours, by_exact) < FP32
        return
    _, by_plain = reference(plain, autocast)
    assert loss == pytest.approx(exact, rel=BF16)
    assert distance(by_ours, by_exact) < AS_EXACT * distance(by_plain, by_exact)


@AUTOCAST
@HEADS
def test_all_weights_get_the_gradient_of_transformers(kind, chunked, autocast):
    plain = build(kind, **OTHERS.get(kind, {}))
    compare(plain, with_loss(plain, chunked), autocast)


@AUTOCAST
@pytest.mark.parametrize("kind", FAMILIES)
def test_an_adapter_gets_the_gradient_of_peft(kind: str, autocast: bool) -> None:
    plain = adapt(build(kind, torch.bfloat16 if autocast else torch.float32))
    compare(plain, with_loss(plain), autocast)


def test_a_fully_trained_head_with_an_adapter_gets_its_gradient() -> None:
    plain = adapt(build("llama"), modules_to_save=["lm_head"])
    given = with_loss(plain)
    compare(plain, given, False)
    assert any("lm_head" in name for name in gradients(given))


def weighted(model: nn.Module, autocast: bool, plain: bool) -> Found:
    """Log-probabilities of the labels, each times another number, as plain transformers has them
    or as ours."""
    given = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if plain:
            found = model(input_ids=given.ids, attention_mask=given.attention_mask).logits
            shares = found[:, :-1].float().log_softmax(-1)
            labels = given.labels[:, 1:]
            logps = shares.gather(2, labels.clamp(min=0)[..., None])[..., 0][labels != -100]
        else:
            logps, _ = token_logps(model, given)
    assert logps.dtype == torch.float32
    total = (logps * torch.linspace(-1, 2, len(logps))).sum()
    (total * SCALE).backward()
    return total.item(), gradients(model)


@AUTOCAST
@HEADS
def test_log_probabilities_have_the_values_and_gradients_of_transformers(kind, chunked, autocast):
    plain = build(kind, **OTHERS.get(kind, {}))
    total, by_ours = weighted(with_loss(plain, chunked), autocast, plain=False)
    exact, by_exact = weighted(copy.deepcopy(plain).float(), False, plain=True)
    if not autocast:
        assert total == pytest.approx(exact, rel=20 * FP32)  # a difference of larger sums
        assert distance(by_ours, by_exact) < 2 * FP32
        return
    _, by_plain = weighted(plain, autocast, plain=True)
    assert distance(by_ours, by_exact) < AS_EXACT * distance(by_plain, by_exact)


@CHUNKED
@pytest.mark.parametrize("kind", ["llama", "granite", "cohere", "gemma2", "biased"])
def test_mean_logit_and_entropy_of_a_token_are_those_of_transformers(kind, chunked):
    """With a soft cap, which is not linear, the chunked head leaves out the mean logit."""
    model, given = build(kind.replace("biased", "llama")), batch()
    if kind == "biased":
        model.lm_head.bias = nn.Parameter(torch.randn(len(model.lm_head.weight)))
    with torch.no_grad():
        found = model(input_ids=given.ids, attention_mask=given.attention_mask).logits
    trained = given.labels[:, 1:] != -100
    expected = found[:, :-1].mean(-1)[trained]
    entropy = Categorical(logits=found[:, :-1][trained].double()).entropy()
    head.give_loss(model, chunked)
    values, _ = _token_values(model, given, statistics=True)
    logps, means, entropies = values.chunk(3)
    assert torch.equal(logps, token_logps(model, given)[0])
    assert (entropies - entropy).abs().max() < 5 * FP32 * entropy.max()
    if kind == "gemma2" and chunked:
        assert means.isnan().all()
    else:
        assert (means - expected).abs().max() < FP32 * expected.abs().max()


def peak_of(compute: Callable[..., torch.Tensor], labels: int, hidden: int, words: int) -> int:
    """Most bytes of new tensors, forward and backward, without a number in them."""
    with FakeTensorMode(), Tracker() as tracker:
        weight, states = torch.randn(words, hidden), torch.randn(labels, hidden, requires_grad=True)
        targets, grad = torch.randint(words, (labels,)), torch.randn(labels)
        tracker.relabel(OTHER, "given")
        tracker.begin("step")
        compute(states, weight, targets).backward(grad)
    return tracker.peaks["step"].parts[OTHER]


@pytest.mark.parametrize("in_c", [False, True])
def test_log_probabilities_take_an_eighth_of_the_memory_of_whole_logits(in_c, monkeypatch):
    """Frozen head, fp32: a chunk and a tile of logits, instead of logits, shares and gradients."""
    monkeypatch.setattr(Chain, "compiling", in_c)  # C cannot read what has no memory
    labels, hidden, words = 1024, 576, 32_000
    chunk, tile = (entries // words for entries in (CHUNK_ENTRIES, TILE_ENTRIES))

    def whole(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -F.cross_entropy(F.linear(states, weight), targets, reduction="none")

    def chunked(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        given = states, weight, None, targets, 1.0, None, chunk, tile
        return ChunkedLogProbs.apply(*given)  # type: ignore[no-any-return]

    plain = peak_of(whole, labels, hidden, words)
    ours = peak_of(chunked, labels, hidden, words)
    assert plain == 4 * (3 * labels * words + labels)
    least = 4 * ((chunk + tile) * words + labels * hidden)
    assert least < ours < least + 8 * labels  # and a few numbers of each label
    assert ours < plain / 8


@pytest.mark.parametrize(("trained", "products"), [(False, 2), (True, 4)])
def test_products_with_the_head_for_log_probabilities(trained: bool, products: int) -> None:
    """Frozen: logits and the gradient of the states; trained: also the logits again, and its own
    gradient."""
    labels, hidden, words = 20, 8, 50
    weight = torch.randn(words, hidden, requires_grad=trained)
    states = torch.randn(labels, hidden, requires_grad=True)
    targets, settings = torch.randint(words, (labels,)), (1.0, None, 7, 3)
    with FlopCounterMode(display=False) as counter:
        found = ChunkedLogProbs.apply(states, weight, None, targets, *settings)
        found.sum().backward()  # type: ignore[union-attr]
    assert counter.get_total_flops() == products * 2 * labels * hidden * words
    with FlopCounterMode(display=False) as counter, torch.no_grad():  # as for a reference
        ChunkedLogProbs.apply(states.detach(), weight, None, targets, *settings)
    assert counter.get_total_flops() == 2 * labels * hidden * words


def test_a_frozen_head_passes_the_gradient_of_log_probabilities_on() -> None:
    plain = adapt(build("llama"))
    _, by_ours = weighted(with_loss(plain), False, plain=False)
    _, by_plain = weighted(plain, False, plain=True)
    assert distance(by_ours, by_plain) < 2 * FP32


@pytest.mark.parametrize("kind", [kind for kind, f in KNOWN.items() if f.logits and not f.reads])
def test_each_known_type_scales_and_caps_its_logits_as_transformers_does(kind: str) -> None:
    fields: dict[str, Any] = {}
    if "moe" in kind:
        fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    plain = build(kind, **(fields | OTHERS.get(kind, {})))
    with torch.no_grad():
        loss = token_loss_sum(with_loss(plain), batch()).item()
        logits = plain(input_ids=batch().ids, attention_mask=batch().attention_mask).logits
    labels = batch().labels[:, 1:].flatten()
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum").item()
    assert loss == pytest.approx(expected, rel=FP32)


def test_a_model_with_its_loss_still_gives_logits_and_text() -> None:
    plain = build("qwen3").eval()
    given, ids = with_loss(plain), batch().ids
    assert torch.equal(given(input_ids=ids).logits, plain(input_ids=ids).logits)
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(given.generate(ids[:1], **settings), plain.generate(ids[:1], **settings))
    assert given.state_dict().keys() == plain.state_dict().keys()
    assert type(given).__name__ == "Qwen3ForCausalLM"


def test_a_micro_batch_without_labels_gives_zero_and_every_gradient() -> None:
    model = build("llama")
    head.give_loss(model, chunked=True)
    nothing = MicroBatch(batch().ids, torch.full_like(batch().ids, -100), None, 0, 0, 0)
    loss = token_loss_sum(model, nothing)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.zero_grad(set_to_none=True)
    sequence_logps(model, nothing)[0].sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_head_with_an_adapter_is_refused_in_chunks() -> None:
    model = adapt(build("llama"), target_modules=["q_proj", "lm_head"])
    with pytest.raises(FinetuneError, match=r"kernels\.head=whole"):
        head.give_loss(model.get_base_model(), chunked=True)
    head.give_loss(model.get_base_model(), chunked=False)
    compare(adapt(build("llama"), target_modules=["q_proj", "lm_head"]), model, False)


def by_hand(logits: torch.Tensor, targets: torch.Tensor, rule: TokenLoss) -> torch.Tensor:
    """The loss of each token, from its distribution."""
    shares = logits.softmax(-1)
    logs = shares.log()
    nll = -logs[torch.arange(len(targets)), targets]
    if rule.weight == "dft":
        return shares[torch.arange(len(targets)), targets].detach() * nll
    if rule.weight == "eaft":
        top = shares.detach().sort(-1, descending=True).values[:, :20]
        top = top / top.sum(-1, keepdim=True)
        return (-(top * top.log()).sum(-1) / math.log(20)) ** rule.power * nll
    return (1 - rule.smoothing) * nll - rule.smoothing * logs.mean(-1)


@CHUNKED
@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize(
    "rule", [TokenLoss(0.1), TokenLoss(weight="dft"), TokenLoss(weight="eaft", power=1.5)]
)
def test_other_losses_of_a_token_are_those_of_their_formulas(kind, rule, chunked):
    plain = build(kind, **OTHERS.get(kind, {}))
    given, read = copy.deepcopy(plain), batch()
    head.give_loss(given, chunked, rule=rule)
    assert token_loss_sum(given.eval(), read).item() == pytest.approx(
        reference(copy.deepcopy(plain), False)[0], rel=FP32
    )
    loss, by_ours = ours(given.train(), False)
    logits = plain(input_ids=read.ids, attention_mask=read.attention_mask).logits[:, :-1]
    labels = read.labels[:, 1:]
    wanted = by_hand(logits[labels != -100].double(), labels[labels != -100], rule).sum()
    (wanted * SCALE).backward()
    assert loss == pytest.approx(wanted.item(), rel=FP32)
    assert distance(by_ours, gradients(plain)) < FP32
