"""Peaks against traces of the real operations, and what must hold of any timeline."""

import dataclasses

import pytest
from planning import BASE, large

import finetune as ft
from finetune.planner.estimate import communication, memory, totals
from finetune.planner.estimate.adapter_sizes import lora
from finetune.planner.estimate.autograd.tape import Tape, Value, trace
from finetune.planner.estimate.head_losses import HF, LINEAR
from finetune.planner.estimate.layout import Layout
from finetune.planner.estimate.predict import workload_of
from finetune.planner.estimate.sharding import resident
from finetune.planner.estimate.workload import Workload, nf4_bits
from finetune.planner.shapes.read_config import read

CONFIGS = {
    "llama": BASE,
    "tied": BASE | {"tie_word_embeddings": True, "vocab_size": 8192},
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 128},
    "gemma": BASE
    | {"model_type": "gemma", "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1,
       "intermediate_size": 8192},
    "gemma2": BASE | {"model_type": "gemma2", "tie_word_embeddings": True},
    "mixtral": BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip

# Peak bytes of the second step (AdamW's moments exist) of 4 rows x 512 tokens, without a mask, as
# a TorchDispatchMode counted live storages under FakeTensor: torch 2.13, transformers 5.23, peft
# 0.21, AdamW(foreach=False). "mixed" is autocast; an adapter under it is fp32.
TRACED = [
    ("llama", "full", "bf16", False, 531739008), ("llama", "full", "bf16", True, 383082880),
    ("llama", "full", "mixed", False, 872702336), ("llama", "full", "mixed", True, 682111360),
    ("llama", "lora", "bf16", False, 364247472), ("llama", "lora", "mixed", False, 435194280),
    ("tied", "full", "bf16", False, 742508924), ("tied", "lora", "mixed", True, 317352368),
    ("qwen3", "full", "bf16", True, 482998424), ("gemma", "full", "bf16", False, 1156289666),
    ("gemma", "lora", "bf16", True, 433761458), ("mixtral", "lora", "bf16", True, 529313600),
    ("mixtral", "full", "bf16", True, 1049190800),
]  # fmt: skip
# The same with scores written out, and `gemma2` with capped ones.
TRACED_EAGER = [
    ("llama", "full", False, 859019648), ("llama", "full", True, 516114816),
    ("llama", "lora", False, 684718512), ("llama", "lora", True, 321137072),
    ("gemma2", "full", True, 569141654), ("gemma2", "lora", True, 376580530),
]  # fmt: skip


def traced_workload(name: str, mode: str, numbers: str, recompute: bool) -> Workload:
    shape = read(CONFIGS[name])
    mixed = numbers == "mixed"
    return Workload(
        shape, 4, 512, scheme="autocast" if mixed else "bf16",
        adapter=lora(shape, 16, width=4 if mixed else 2) if mode == "lora" else None,
        checkpointing="full" if recompute else "none", loss=HF, stepping="loop",
    )  # fmt: skip


@pytest.mark.parametrize(("name", "mode", "numbers", "recompute", "expected"), TRACED)
def test_a_peak_is_that_of_the_traced_step(name, mode, numbers, recompute, expected):
    peak = memory.timeline(traced_workload(name, mode, numbers, recompute)).peak.total
    # Layers are followed operation by operation, but not how adapters of experts are multiplied.
    adapted = (name, mode) == ("mixtral", "lora")
    assert peak == pytest.approx(expected, rel=0.02 if adapted else 0.001)


@pytest.mark.parametrize(("name", "mode", "recompute", "expected"), TRACED_EAGER)
def test_scores_that_are_written_out_have_the_peak_of_the_traced_step(
    name, mode, recompute, expected
):
    workload = traced_workload(name, mode, "bf16", recompute)
    peak = memory.timeline(dataclasses.replace(workload, attention="eager")).peak.total
    # The mask, one for each kind of layer, is not counted: 2 bytes of 12 for each head.
    assert peak == pytest.approx(expected, rel=0.01 if name == "gemma2" else 0.004)


def test_a_moment_is_the_sum_of_its_parts_the_peak_the_largest_and_totals_are_within_their_band():
    timeline = memory.timeline(large())
    assert all(m.total == sum(m.parts.values()) for m in timeline.moments)
    assert timeline.peak.total == max(m.total for m in timeline.moments)
    assert len({m.name for m in timeline.moments}) == len(timeline.moments) == 9
    for change in ({"rows": 2}, {"length": 4096}):
        for recompute in ("none", "full"):
            before = memory.timeline(large(checkpointing=recompute)).peak.total
            assert memory.timeline(large(checkpointing=recompute, **change)).peak.total > before
    workload = large(layout=Layout("fsdp", "params", 8), scheme="fsdp")
    found = totals.of(memory.timeline(workload), workload)
    assert found.allocated < found.reserved < found.process
    assert found.low < found.process < found.high


def test_full_weights_take_sixteen_bytes_and_ddp_keeps_earlier_gradients_beside_its_buckets():
    parameters = large().shape.parameters
    layouts = Layout("single", "none", 1), Layout("ddp", "none", 8)
    for layout in layouts:  # gradients of DDP are views of its buckets
        update = memory.timeline(large(layout=layout)).moments[-1]
        assert update.total == pytest.approx(16 * parameters, rel=0.001)
    parameters, layout = large().shape.parameters, Layout("ddp", "none", 8)
    once, twice = (memory.timeline(large(layout=layout, accumulation=n)) for n in (1, 2))
    assert twice.peak.total - once.peak.total == pytest.approx(4 * parameters, rel=0.05)


def test_sharding_divides_states_and_offload_moves_them_to_the_host():
    full = Layout("fsdp", "params", 8)
    held = resident.state(large(scheme="fsdp", layout=full))
    parameters = large().shape.parameters
    assert (held["weights"], held["optimizer"]) == (4 * parameters / 8, 8 * parameters / 8)
    twice = resident.state(large(scheme="fsdp", layout=Layout("fsdp", "params", 8, 2)))
    assert twice["weights"] == 4 * parameters / 4
    workload = large(scheme="deepspeed", layout=Layout("deepspeed", "params", 1, 1, "all", "cpu"))
    held = resident.state(workload)
    assert (held["weights"], held["optimizer"]) == (0, 0)
    saved = 12  # the copy from which a checkpoint is written: weights and moments
    assert max(resident.host(workload)) == (18 * 1.5 + saved) * workload.shape.parameters
    assert memory.timeline(workload).peak.parts["units"] > 0


def test_whole_gradients_of_accumulation_are_fsdps_price_for_reducing_once():
    fields = {"scheme": "fsdp", "layout": Layout("fsdp", "params", 8), "checkpointing": "full"}
    once, kept = (memory.timeline(large(accumulation=count, **fields)) for count in (1, 4))
    grown = kept.moments[1].parts["gradients"] - once.moments[1].parts["gradients"]
    assert grown == 4 * large().shape.parameters


def test_paged_moments_are_the_hosts_and_no_byte_of_the_gpus_count():
    paged = large(update="paged_adamw_8bit")
    plain = large(update="adamw_8bit")
    held, moments = resident.state(plain)["optimizer"], plain.moments * plain.trained
    assert held == moments > 16e9
    assert resident.state(paged)["optimizer"] == 0
    assert resident.offloaded(paged) - resident.offloaded(plain) == moments
    peaks = [memory.timeline(each).peak.total for each in (plain, paged)]
    assert peaks[0] - peaks[1] == moments
    # A CPU has one memory: the moments are in it.
    assert resident.state(dataclasses.replace(paged, cpu=True))["optimizer"] == moments


def test_a_loss_without_logits_leaves_the_layers_as_the_peak():
    adapted = large(adapter=lora(large().shape, 16), checkpointing="full")
    whole = memory.timeline(adapted)
    assert whole.peak.name == "backward: loss and head"
    cut = memory.timeline(dataclasses.replace(adapted, loss=LINEAR))
    # Shares of the softmax and two gradients in fp32, three times 4 bytes a token and entry; the
    # last norm, beside them, takes under 2 % of that.
    assert whole.peak.parts["loss"] == pytest.approx(12 * 2048 * 128256, rel=0.02)
    assert cut.peak.name.endswith("layer")
    assert cut.peak.total < whole.peak.total


def test_nf4_takes_the_bits_of_its_paper():
    assert nf4_bits() == 4 + 8 / 64 + 32 / (64 * 256)
    assert nf4_bits(double_quantised=False) == 4.5
    workload = large(adapter=lora(large().shape, 16), quantization="nf4")
    inside = 32 * workload.shape.linear_weights
    outside = workload.shape.parameters - inside
    assert workload.frozen_bytes == inside * nf4_bits() / 8 + 2 * outside


def test_adapters_make_ddp_cheap_and_hybrid_sharding_reduces_its_shard_between_nodes():
    weights, adapters = 2 * 8_030_261_248, 2 * 41_943_040
    ddp = communication.volume(Layout("ddp", "none", 8), weights, adapters, adapters)
    full = communication.volume(Layout("fsdp", "params", 8), weights, adapters, adapters)
    assert (ddp.total, full.total) == (2 * adapters * 7 / 8, (2 * weights + adapters) * 7 / 8)
    weights = 16e9
    moved = communication.volume(Layout("fsdp", "params", 16, 2), weights, weights, weights)
    assert (moved.inside, moved.between) == (3 * weights * 7 / 8, 2 * weights / 8 / 2)


def test_a_tape_frees_what_nothing_needs_and_keeps_gradients_of_parameters():
    tape, source = Tape(), Value(8)
    doubled = tape.run(8, (source,))
    result = trace(tape, source, tape.run(8, (doubled,), (doubled,)))
    assert result.saved == 8  # the doubled value, for the square's gradient
    assert result.forward == 16
    assert result.backward == 24  # it, the gradient that came in, and the one being made
    assert result.gradients == 0
    tape, source = Tape(), Value(4)
    weight = Value(10, leaf=True)
    product = tape.run(4, (source, weight), (source,))
    result = trace(tape, source, tape.run(4, (source, product), passes=True))
    assert result.gradients == 10
    assert result.saved == 4
    # gradient that came in, that of the source through the product, their sum, the weight's
    assert result.backward == 4 + 4 + 4 + 10


@pytest.mark.parametrize(("kernel", "logits"), [("chunked", False), ("whole", True)])
def test_logits_are_planned_where_the_head_makes_them(kernel, logits):
    config = BASE | {"vocab_size": 32_000}
    recipe = ft.SFT(ft.Model(config=config, tokenizer="t"), data=(ft.Data("d", "text"),))
    settled = ft.plan(recipe.with_kernels(head=kernel), "single")
    assert workload_of(settled, read(config)).loss.logits is logits
