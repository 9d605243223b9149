"""The plan follows the kernels of a run: what layers keep, what the head and DeepSpeed allocate."""

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model
from planning import BASE, large
from transformers import LlamaConfig, LlamaForCausalLM

import finetune as ft
from finetune.kernels.activation import fuse_activations
from finetune.kernels.lora import group_adapters
from finetune.kernels.norm import fuse_norms
from finetune.kernels.rotary import fuse_rotations
from finetune.planner import plan
from finetune.planner.estimate import memory
from finetune.planner.estimate.adapter_sizes import lora
from finetune.planner.estimate.autograd.layer import Layer
from finetune.planner.estimate.autograd.tape import Tape, Value, trace
from finetune.planner.estimate.autograd.traces import traces
from finetune.planner.estimate.head_losses import CHUNKED, OURS
from finetune.planner.estimate.layout import Layout
from finetune.planner.estimate.predict import workload_of
from finetune.planner.estimate.sharding.zero import Gradients
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.read_config import read

SMALL = BASE | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "head_dim": 16,
}  # fmt: skip
ROWS, LENGTH, RANK = 2, 24, 4


def kept_by_a_real_layer(fused: bool, targets: list[str]) -> int:
    """Bytes that one layer of transformers and PEFT saves in bf16 under autocast."""
    fields = {name: value for name, value in SMALL.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
    model.requires_grad_(False)
    get_peft_model(model, LoraConfig(r=RANK, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    if fused:
        fuse_norms(model)
        fuse_activations(model)
        fuse_rotations(model)
    group_adapters(model)
    hidden = torch.randn(ROWS, LENGTH, 64, dtype=torch.bfloat16, requires_grad=True)
    tables = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    known = {t.untyped_storage().data_ptr() for t in (*tables, *model.parameters())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    layer = model.model.layers[0]
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with saving, torch.autocast("cpu", torch.bfloat16):
        layer(hidden, position_embeddings=tables, attention_mask=None)
    return sum(storage.nbytes() for storage in kept.values())


def kept_by_the_tape(fused: bool, targets: tuple[str, ...]) -> float:
    shape = read(SMALL)
    adapter = lora(shape, RANK, targets, width=4)
    workload = Workload(
        shape, ROWS, LENGTH, adapter=adapter, fused_norms=fused, fused_activations=fused,
        fused_rotations=fused, grouped_adapters=True,
    )  # fmt: skip
    layer = Layer(workload)
    return trace(*layer.build()).saved


EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("targets", [EVERY, ("q_proj", "v_proj", "up_proj")], ids=["all", "some"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_layer_of_grouped_adapters_keeps_the_tensors_of_the_tape(fused, targets):
    expected = kept_by_a_real_layer(fused, list(targets))
    assert kept_by_the_tape(fused, targets) == expected


def test_an_operation_of_several_outputs_waits_for_all_their_gradients():
    tape, source = Tape(), Value(4)
    first, second = tape.run_many((8, 16), (source,), (source,), forward=2, backward=1)
    inner = tape.run(8, (first,))
    found = trace(tape, source, tape.run(4, (inner, second)))
    assert found.saved == 4
    assert found.forward == 4 + 8 + 16 + 8  # first is alive while inner is made
    # Its own gradients of 8 and 16, what it keeps and needs, and the gradient that it makes.
    assert found.backward == max(4 + 4 + 8 + 16, 4 + 8 + 16 + 8, 4 + 8 + 16 + 4 + 1)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_a_chunked_head_holds_chunks_and_gradients(trained):
    adapter = None if trained else lora(large().shape, 16)
    workload = large(loss=CHUNKED, scheme="bf16", adapter=adapter, length=4096)
    vocabulary, hidden = 128_256, 4096
    found = traces(workload).head
    chunk, tile = (entries // vocabulary * vocabulary for entries in (2**27, 2**25))
    stream, table = 2 * 4096 * hidden, vocabulary * hidden
    # The last norm's result and the labelled rows of it, a chunk of logits in bf16, a tile of it in
    # fp32 with its shares, or the gradient of the head; and the sum of these.
    working = max(8 * tile, 2 * table * trained) + 4 * table * trained
    kept = found.trace.saved - 2 * table * trained  # the head's gradient becomes bf16 afterwards
    assert found.projected == kept + 2 * stream + 2 * chunk + working + 4


def test_fsdp_frees_a_head_of_its_own_before_the_last_norm_runs_backwards():
    adapter, layout = lora(large().shape, 16), Layout("fsdp", "params", 8)
    fields = {"loss": CHUNKED, "scheme": "fsdp", "adapter": adapter, "fused_norms": True}
    workload = large(length=4096, layout=layout, **fields)
    (moment,) = [
        each for each in memory.timeline(workload).moments if each.name == "backward: loss and head"
    ]
    head, stream, layer = 2 * 128_256 * 4096, 2 * 4096 * 4096, workload.unit_bytes
    held = sum(moment.parts[part] for part in ("loss", "units"))
    # The norm's input, the gradients of the labelled rows and of the rows that they are picked of.
    apart = head + layer + 3 * stream
    assert held == pytest.approx(apart, rel=1e-3)
    # The norm makes wide copies, when the head has gone.
    norm = traces(workload).head.trace.backward
    assert norm > 4 * stream
    assert layer + norm < apart


def moments(shard: str, **fields: object) -> dict[str, dict[str, float]]:
    layout = Layout("deepspeed", shard, 2)
    workload = large(layout=layout, scheme="deepspeed", wide_gradients=True, **fields)
    return {moment.name: dict(moment.parts) for moment in memory.timeline(workload).moments}


def test_zero_holds_gradients_where_deepspeed_allocates_them():
    adapter = lora(large().shape, 16)
    trained = adapter.parameters
    one, two, three = (
        moments(shard, adapter=adapter) for shard in ("optimizer", "grads", "params")
    )
    for found, moment, part, expected in (
        (one, "forward: head", "gradients", 4 * trained),  # fp32, of all
        (one, "gradients reduced", "gradients", (4 + 2) * trained),
        (one, "gradients reduced", "buckets", 2 * trained),  # sent in bf16
        (one, "optimizer step", "gradients", (4 + 2) * trained),
        (two, "forward: head", "gradients", 0),
        (two, "forward: head", "buckets", 0),
        # Two buckets: one is filled while the other is reduced. They are allocated whole.
        (two, "backward: first layer", "buckets", 2 * 2 * trained),
        (two, "gradients reduced", "buckets", 2 * 2 * trained + 2 * trained),
        (two, "optimizer step", "gradients", 4 * trained / 2),
        (two, "optimizer step", "buckets", 0),
        (three, "forward: head", "buckets", 2 * trained),
        (three, "forward: head", "gradients", 4 * trained / 2),
        (three, "gradients reduced", "buckets", (2 + 2 + 4 / 2) * trained),
        (three, "optimizer step", "update", 4 * trained / 2),
    ):
        assert found[moment][part] == expected, (moment, part)


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "gpu"])
def test_an_offloaded_optimizer_leaves_gradients_in_both_places(cpu):
    trained, table = large().shape.parameters, large().shape.embedding
    fields = {"scheme": "deepspeed", "wide_gradients": True, "cpu": cpu}
    two, three = (
        large(layout=Layout("deepspeed", shard, 2, offload="optimizer"), **fields)
        for shard in ("grads", "params")
    )
    # ZeRO-2: fp32 and bf16 of its share, and room for a gradient on either side.
    assert Gradients(two).standing == 2 * table + ((4 + 2) * trained / 2 + 2 * table if cpu else 0)
    assert Gradients(two).reduced == 4 * trained / 2  # on the device, whatever is offloaded
    assert not Gradients(two).leave
    assert Gradients(three).standing == 4 * trained / 2 + (4 * trained / 2 if cpu else 0)
    assert Gradients(three).leave != cpu


def test_a_full_bucket_is_reduced_while_layers_run():
    bucket, found = 500_000_000, moments("grads")["backward: first layer"]
    assert found["buckets"] == 2 * 2 * bucket + 2 * bucket
    assert found["gradients"] == 4 * large().shape.parameters / 2


def test_a_plan_follows_the_kernels_of_its_run():
    recipe = ft.SFT(ft.Model(config=BASE, tokenizer="/none")).with_lora(r=16, dropout=0.0)
    recipe = recipe.with_data(ft.Data("rows.jsonl", "messages"))
    shape = read(BASE)
    grouped = workload_of(plan(recipe, "single", 1), shape)
    assert (grouped.loss, grouped.fused_norms, grouped.grouped_adapters) == (CHUNKED, True, True)
    assert (grouped.fused_activations, grouped.fused_rotations) == (True, True)
    plain = ft.Kernels("whole", "separate", norm="plain", activation="plain", rotary="plain")
    left = workload_of(plan(dataclasses.replace(recipe, kernels=plain), "single", 1), shape)
    assert (left.loss, left.fused_norms, left.grouped_adapters) == (OURS, False, False)
    assert (left.fused_activations, left.fused_rotations) == (False, False)
    gathered = workload_of(plan(recipe, "zero3", 2), shape)
    assert not gathered.grouped_adapters
    moved = dataclasses.replace(grouped, layout=gathered.layout, scheme="deepspeed")
    assert not moved.groups_adapters  # as advice on another backend asks
