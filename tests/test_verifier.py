"""The tracker counts what can be counted by hand; plans of real shapes hold against their trace."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Finished, gpus_are_here, run_command, warm_python, write_recipe

from finetune import catalog
from finetune.planner import plan
from finetune.verification.memory.plan_and_trace import LAYERS, Row, alone, extrapolate, line, notes

H, F, LAYER_COUNT, VOCAB, ROWS, LENGTH = 64, 192, 16, 512, 2, 128
LLAMA = {
    "model_type": "llama", "hidden_size": H, "num_hidden_layers": LAYER_COUNT,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": F,
    "vocab_size": VOCAB, "tie_word_embeddings": False, "head_dim": 16,
}  # fmt: skip
WIDE = LLAMA | {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2816, "vocab_size": 8192,
}  # fmt: skip
PARAMETERS_OF_A_LAYER = 2 * H * H + 2 * H * 32 + 3 * H * F + 2 * H
H100 = "--gpu H100-80 --backend"


@pytest.fixture
def recipe(tmp_path) -> Callable[..., Path]:
    """Write a recipe whose model is a folder with a config and nothing else."""

    def write(config: dict[str, Any] = LLAMA, **sections: Any) -> Path:
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(config))
        fields: dict[str, Any] = {
            "method": "sft",
            "model": {"name": str(model)} | sections.pop("model", {}),
            "data": [{"source": "rows.jsonl", "format": "messages"}],
            "batch": {"rows": 4 * ROWS, "micro_rows": ROWS, "max_length": LENGTH},
        }
        return write_recipe(tmp_path / "recipe.json", fields | sections)

    return write


@pytest.fixture
def plan_verified(session_cache) -> Callable[..., Finished]:
    """`finetune plan --verify`, whose traces are forked from a process with its imports done."""
    python = sys.executable if gpus_are_here() else warm_python()

    def plan(recipe: Path | str, words: str, how: str = "--verify") -> Finished:
        command = [python, "-m", "finetune", "plan", str(recipe), *f"{words} {how}".split()]
        return run_command(command, session_cache, ROOT)

    return plan


@pytest.fixture
def verified(plan_verified) -> Callable[..., dict[str, Any]]:
    """What the trace and the formulas say of a plan, by default that they agree."""

    def verify(recipe: Path | str, words: str) -> dict[str, Any]:
        found = json.loads(plan_verified(recipe, f"{words} --json").passed().stdout)["verification"]
        assert found["agrees"], found
        return found

    return verify


def traced(found: dict[str, Any]) -> dict[str, int]:
    return {each["component"]: each["traced"] for each in found["components"]}


def test_the_tracker_counts_what_is_alive_at_the_largest_instant(tmp_path):
    """A storage counts once, whatever views it has, and nothing counts on the meta device."""
    body = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from finetune.verification.memory.tracker import Tracker
with FakeTensorMode():
    weight = torch.empty(100, 10, requires_grad=True)  # 4,000 bytes
    given = torch.empty(20, 10)  # 800
    with Tracker() as tracker:
        tracker.hold([weight, given], "weights")
        tracker.begin("forward")
        inner = (given @ weight.t()).relu()  # twice 8,000: the product, and relu's output
        loss = inner.sum()  # 4
        tracker.begin("backward")
        loss.backward()
print(tracker.peaks["forward"].total, tracker.peaks["backward"].parts["weights"])
del inner, loss
print(tracker.parts())
with FakeTensorMode(), Tracker() as tracker:
    whole = torch.empty(1000)
    views = [whole[:10], whole.view(10, 100), whole.t()]
    empty = torch.empty(1000, device="meta")
    print(tracker.parts())
"""
    done = run_command([warm_python(), "-c", body], tmp_path).passed()
    first, parts, of_views = done.stdout.splitlines()
    assert first == "20800 4800"
    assert parts == "{'weights': 4800, 'activations': 4000}"  # the gradient of the weight is left
    assert of_views == "{'activations': 4000}"


def test_steps_are_extrapolated_by_lines_and_micro_batches_and_compared_within_a_tolerance():
    steps = [{"layers": 2, "x": None}, {"layers": 4, "x": 14.0}, {"layers": 6, "x": 18.0}]
    assert line(steps, 10, lambda step: step["x"]) == 26.0

    def step(layers: int) -> dict[str, Any]:
        once = {"all_gather": (layers, 10 * layers)}
        return {
            "layers": layers, "parameters": 0, "trained": 0, "held": {}, "gradients": 0,
            "saved": 0, "peaks": {},
            "collectives": {"first": once, "middle": once, "last": once},
        }  # fmt: skip

    found = extrapolate([step(size) for size in LAYERS], 10, accumulation=5, offload=False)
    assert (found.counts["all_gather"], found.payload["all_gather"]) == (50, 500)
    assert Row("weights", 104, 100).agrees
    assert not Row("weights", 106, 100).agrees
    assert Row("adapters", 106, 100, scale=601).agrees  # six bytes of 601 are under 1 %
    assert not Row("parameters", 101, 100, "elements").agrees


def test_a_plan_of_one_device_is_verified(recipe, verified):
    parts = traced(verified(recipe(adapter={"r": 8, "dropout": 0.1}), f"{H100} single"))
    assert parts["parameters"] == LAYER_COUNT * PARAMETERS_OF_A_LAYER + 2 * VOCAB * H + H
    adapters = LAYER_COUNT * 8 * (2 * (H + H) + 2 * (H + 32) + 3 * (H + F))
    assert parts["trained parameters"] == adapters
    assert parts["adapters"] == parts["gradients"] == 4 * adapters


@pytest.mark.slow
def test_a_job_on_several_nodes_is_rehearsed_without_the_name_of_a_gpu(recipe, plan_verified):
    words = "--backend fsdp_full_shard --gpus 4 --nodes 2 --json"
    done = plan_verified(recipe(adapter={"r": 8}), words)
    assert done.status in (0, 1), done.output
    found = json.loads(done.stdout)["verification"]
    assert done.status == (found["agrees"] is False)
    assert found["collectives"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_every_large_moment_of_the_kernels_is_that_of_the_trace(recipe, verified, method):
    sections: dict[str, Any] = {} if method == "full" else {"adapter": {"r": 16, "dropout": 0.0}}
    model = {"quantization": "nf4"} if method == "qlora" else {}
    batch = {"rows": 4, "micro_rows": 4, "max_length": 512}
    found = verified(recipe(WIDE, model=model, batch=batch, **sections), f"{H100} single")
    totals = {each["name"]: each for each in found["moments"]}
    for name in ("forward: head", "backward: loss and head", "backward: last layer"):
        # Ids, labels and places are left out.
        assert totals[name]["predicted"] == pytest.approx(totals[name]["traced"], rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "tied"), [("none", True), ("nf4", False)])
def test_layers_are_gathered_beside_the_buffers_of_embedding_and_head(
    recipe, verified, quantization, tied
):
    """FSDP's largest moments where rows are short: several buffers of weights at once."""
    config = WIDE | {"vocab_size": 16384, "tie_word_embeddings": tied}
    file = recipe(config, adapter={"r": 8}, model={"quantization": quantization})
    found = verified(file, f"{H100} fsdp_full_shard --gpus 4")
    totals = {each["name"]: each for each in found["moments"]}
    for name in ("forward: embedding", "forward: head"):
        assert totals[name]["predicted"] == pytest.approx(totals[name]["traced"], rel=0.02)


def test_collectives_of_a_sharded_job_are_those_that_can_be_counted(recipe, verified):
    found = verified(recipe(), f"{H100} fsdp_full_shard --gpus 4")
    layers = LAYER_COUNT * PARAMETERS_OF_A_LAYER
    # Layers and embedding are gathered for each pass, head and last norm once: they stay.
    reduced = 4 * (layers + 2 * VOCAB * H + H)
    assert found["collectives"]["all_gather"]["bytes"] == 2 * (2 * layers + 3 * VOCAB * H + H)
    assert found["collectives"]["reduce_scatter"]["bytes"] == reduced
    assert traced(found)["weights"] == pytest.approx(reduced / 4, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 8], ids=["full", "lora"])
def test_stages_of_a_mesh_are_traced(recipe, verified, rank):
    """What each sends along each axis, by hand: hidden states, and sums of the layers."""
    sections: dict[str, Any] = {}
    backend, processes, micro, vote = "pp_tp_fsdp", 8, 2, 4
    # Two products cut by rows forwards, five by columns backwards, in each layer.
    wide, narrow = 7, 0
    if rank:
        backend, processes = "pp_tp", 4
        sections = {"adapter": {"r": rank}, "model": {"activation_checkpointing": True}}
        # The forward ones again, and for each product the values between A and B.
        wide, narrow = 9, 2 + 2 + 5
    batch = {"rows": micro * processes // 4, "micro_rows": 1, "max_length": LENGTH}
    file = recipe(LLAMA | {"num_hidden_layers": 5}, batch=batch, **sections)
    found = verified(file, f"{H100} {backend} --gpus {processes}")
    assert [*found["stages"]] == ["0", "1"]
    stream = LENGTH * H * 2
    for stage, layers in (("0", 3), ("1", 2)):
        parts = {each["component"]: each for each in found["stages"][stage]["components"]}
        assert parts["pipeline send"]["traced"] == micro * stream + vote
        sums = layers * (wide * stream + narrow * LENGTH * rank * 2)
        sums = micro * (sums + stream)  # and of the embedding, or to the head
        assert parts["tensor all-reduce"]["traced"] == pytest.approx(sums, abs=200)
        assert parts["tensor all-reduce"]["predicted"] == pytest.approx(sums, abs=200)
        if not rank:
            assert abs(parts["shard all-gather"]["difference"]) < 0.001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "backend"),
    [("reward", "sp_tp --gpus 4"), ("dpo", "cp --rotation alltoall --gpus 2")],
)
def test_a_step_of_pairs_whose_tokens_are_divided_is_traced(recipe, verified, method, backend):
    """Tensor parallelism leaves one key head, which both processes of a row get."""
    data = [{"source": "rows.jsonl", "format": "preference"}]
    verified(
        recipe(LLAMA | {"num_hidden_layers": 5}, method=method, data=data), f"{H100} {backend}"
    )


@pytest.mark.slow
def test_a_score_head_leaves_the_embedding_a_unit_of_its_own(recipe, verified):
    """FSDP2 gathers it again before the backward pass of the first layer, though it is frozen."""
    file = recipe(
        WIDE | {"num_hidden_layers": 6, "tie_word_embeddings": True}, method="reward",
        data=[{"source": "rows.jsonl", "format": "preference"}], adapter={"r": 4},
    )  # fmt: skip
    found = verified(file, f"{H100} fsdp_full_shard --gpus 2")
    parts = {each["component"]: each["difference"] for each in found["components"]}
    assert parts["all-gathers, sent"] == pytest.approx(0, abs=1e-3)
    assert parts["peak"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("engine", "word"), [("zero3", "DeepSpeed's engine"), ("ddp", "DDP's")])
def test_an_engine_that_cannot_be_traced_is_named(engine, word, recipe):
    settled = plan(catalog.load(recipe()), engine, 4)
    (note,) = notes(settled, sharded=False)
    assert note.startswith(word)
    assert "only the same work on one device was" in note
    assert (alone(settled).accumulation, alone(settled).processes) == (settled.accumulation, 1)


UNKNOWN = LLAMA | {"model_type": "lfm2", "num_key_value_heads": 4, "full_attn_idxs": [2, 5]}
UNKNOWN |= {"block_auto_adjust_ff_dim": False}


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_an_architecture_without_formulas_is_planned_as_it_is_traced(
    recipe, plan_verified, recomputes
):
    """Its layers are those of a Llama, with what a trace of a few of them saves in addition."""
    given = recipe(UNKNOWN, model={"activation_checkpointing": recomputes}, adapter={"r": 8})
    done = json.loads(plan_verified(given, f"{H100} single --json", how="").passed().stdout)
    assert done["prediction"]["model"]["parameters"] > 0
    found = json.loads(plan_verified(given, f"{H100} single --json").passed().stdout)
    assert found["verification"]["agrees"] is None
    peak = done["prediction"]["memory"]["allocated"]
    assert peak == pytest.approx(traced(found["verification"])["peak"], rel=0.05)


FALCON = {
    "model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256,
    "num_hidden_layers": 8, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "told"),
    [
        (FALCON, "set model.attention=eager"),
        (UNKNOWN | {"model_type": "never_heard_of"}, "model_type 'never_heard_of'"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_its_reason(
    recipe, plan_verified, config, told
):
    said = plan_verified(recipe(config), f"{H100} single").refused()
    assert config["model_type"] in said
    assert told in said


def test_a_step_that_needs_completions_is_refused(plan_verified, assets):
    words = f"model.name={assets / 'configs/Qwen3-0.6B'} {H100} single"
    said = plan_verified("qwen3_0_6b_grpo", words).refused()
    assert "--verify: a step of grpo needs sampled completions, which a trace does" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine", "gpus", "config"),
    [
        ("llama3_3_70b_qlora", "fsdp_full_shard", 64, "Llama-3-70B"),
        ("llama3_1_8b_full", "fsdp_full_shard", 8, "Llama-3.1-8B"),
    ],
)
def test_a_shipped_recipe_is_verified(verified, assets, name, machine, gpus, config):
    words = f"model.name={assets / 'configs' / config} {H100} {machine}"
    verified(name, f"{words} --gpus {gpus} --nodes {max(1, gpus // 8)}")
