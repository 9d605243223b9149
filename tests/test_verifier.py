"""The tracker counts what can be counted by hand; plans of real shapes hold against their trace."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import Finetune, environment, warm_python, write_recipe

from finetune import catalog
from finetune.planner import plan
from finetune.verification.memory.comparison import LAYERS, Row, alone, extrapolate, line, notes

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


def recipe(folder: Path, config: dict[str, Any], **sections: Any) -> Path:
    """A recipe whose model is a folder with a config and nothing else."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    fields: dict[str, Any] = {
        "method": "sft",
        "model": {"name": str(model)} | sections.pop("model", {}),
        "data": [{"source": "rows.jsonl", "format": "messages"}],
        "batch": {"rows": 4 * ROWS, "micro_rows": ROWS, "max_length": LENGTH},
        **sections,
    }
    return write_recipe(folder / "recipe.json", fields)


def verification(finetune: Finetune, *words: str | Path) -> dict[str, Any]:
    done = finetune("plan", *words, "--verify", "--json")
    assert done.status in (0, 1), done.output
    found = json.loads(done.stdout)["verification"]
    assert done.status == (1 if found["agrees"] is False else 0)
    return found


def traced(found: dict[str, Any]) -> dict[str, int]:
    return {each["component"]: each["traced"] for each in found["components"]}


def run_traced(body: str, cache: Path) -> str:
    """Run code with a tracker in a process of its own."""
    head = "import torch\nfrom finetune.verification.memory.tracker import Tracker\n"
    done = subprocess.run(
        [warm_python(), "-c", head + body],
        env=environment(cache),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tracker_counts_what_is_alive_at_the_largest_instant(tmp_path: Path) -> None:
    body = """
from torch._subclasses.fake_tensor import FakeTensorMode
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
"""
    first, parts = run_traced(body, tmp_path).splitlines()
    assert first == "20800 4800"
    assert parts == "{'weights': 4800, 'activations': 4000}"  # the gradient of the weight is left


def test_the_tracker_counts_a_storage_once_whatever_views_it_has(tmp_path: Path) -> None:
    """And nothing on the meta device."""
    body = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(), Tracker() as tracker:
    whole = torch.empty(1000)
    views = [whole[:10], whole.view(10, 100), whole.t()]
    empty = torch.empty(1000, device="meta")
    print(tracker.parts())
"""
    assert run_traced(body, tmp_path) == "{'activations': 4000}\n"


def test_a_line_goes_through_the_first_two_steps_that_have_the_value() -> None:
    steps = [{"layers": 2, "x": None}, {"layers": 4, "x": 14.0}, {"layers": 6, "x": 18.0}]
    assert line(steps, 10, lambda step: step["x"]) == 26.0


def test_collectives_of_middle_micro_batches_count_as_often_as_there_are() -> None:
    def step(layers: int) -> dict[str, Any]:
        once = {"all_gather": (layers, 10 * layers)}
        return {
            "layers": layers, "parameters": 0, "trained": 0, "held": {}, "gradients": 0,
            "saved": 0, "peaks": {},
            "collectives": {"first": once, "middle": once, "last": once},
        }  # fmt: skip

    found = extrapolate([step(size) for size in LAYERS], 10, accumulation=5, offload=False)
    assert (found.counts["all_gather"], found.payload["all_gather"]) == (50, 500)


def test_a_component_differs_beyond_its_tolerance_only_where_it_matters() -> None:
    assert Row("weights", 104, 100).agrees
    assert not Row("weights", 106, 100).agrees
    assert Row("adapters", 106, 100, scale=601).agrees  # six bytes of 601 are under 1 %
    assert not Row("parameters", 101, 100, "elements").agrees


def test_a_plan_of_one_device_is_verified(finetune: Finetune, tmp_path: Path) -> None:
    file = recipe(tmp_path, LLAMA, adapter={"r": 8, "dropout": 0.1})
    found = verification(finetune, file, "--gpu", "H100-80", "--backend", "single")
    assert found["agrees"], found
    parts = traced(found)
    assert parts["parameters"] == LAYER_COUNT * PARAMETERS_OF_A_LAYER + 2 * VOCAB * H + H
    adapters = LAYER_COUNT * 8 * (2 * (H + H) + 2 * (H + 32) + 3 * (H + F))
    assert parts["trained parameters"] == adapters
    assert parts["adapters"] == parts["gradients"] == 4 * adapters


def test_a_job_on_several_nodes_is_rehearsed_without_the_name_of_a_gpu(
    finetune: Finetune, tmp_path: Path
) -> None:
    words = ["--backend", "fsdp_full_shard", "--gpus", "4", "--nodes", "2"]
    assert verification(finetune, recipe(tmp_path, LLAMA, adapter={"r": 8}), *words)["collectives"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_every_large_moment_of_the_kernels_is_that_of_the_trace(
    finetune: Finetune, tmp_path: Path, method: str
) -> None:
    sections: dict[str, Any] = {} if method == "full" else {"adapter": {"r": 16, "dropout": 0.0}}
    model = {"quantization": "nf4"} if method == "qlora" else {}
    batch = {"rows": 4, "micro_rows": 4, "max_length": 512}
    file = recipe(tmp_path, WIDE, model=model, batch=batch, **sections)
    found = verification(finetune, file, "--gpu", "H100-80", "--backend", "single")
    assert found["agrees"], found
    totals = {each["name"]: each for each in found["moments"]}
    for name in ("forward: head", "backward: loss and head", "backward: last layer"):
        # Ids, labels and places are left out.
        assert totals[name]["predicted"] == pytest.approx(totals[name]["traced"], rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_weights_of_the_head_are_gathered_with_the_last_layer(
    finetune: Finetune, tmp_path: Path, quantization: str
) -> None:
    """FSDP's largest moment where rows are short: three buffers of weights at once."""
    file = recipe(
        tmp_path,
        WIDE | {"vocab_size": 16384},
        adapter={"r": 8},
        model={"quantization": quantization},
    )
    words = ["--backend", "fsdp_full_shard", "--gpus", "4", "--gpu", "H100-80"]
    found = verification(finetune, file, *words)
    assert found["agrees"], found
    (head,) = [each for each in found["moments"] if each["name"] == "forward: head"]
    assert head["predicted"] == pytest.approx(head["traced"], rel=0.02)


def test_collectives_of_a_sharded_job_are_those_that_can_be_counted(
    finetune: Finetune, tmp_path: Path
) -> None:
    file = recipe(tmp_path, LLAMA)
    words = ["--backend", "fsdp_full_shard", "--gpus", "4", "--gpu", "H100-80"]
    found = verification(finetune, file, *words)
    assert found["agrees"], found
    layers = LAYER_COUNT * PARAMETERS_OF_A_LAYER
    # Layers and embedding are gathered for each pass, head and last norm once: they stay.
    gathered = 2 * (2 * layers + 3 * VOCAB * H + H)
    reduced = 4 * (layers + 2 * VOCAB * H + H)
    assert found["collectives"]["all_gather"]["bytes"] == gathered
    assert found["collectives"]["reduce_scatter"]["bytes"] == reduced
    assert traced(found)["weights"] == pytest.approx(reduced / 4, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 8], ids=["full", "lora"])
def test_stages_of_a_mesh_are_traced(finetune: Finetune, tmp_path: Path, rank: int) -> None:
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
    file = recipe(tmp_path, LLAMA | {"num_hidden_layers": 5}, batch=batch, **sections)
    words = ["--backend", backend, "--gpu", "H100-80", "--gpus", str(processes)]
    found = verification(finetune, file, *words)
    assert found["agrees"], found
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
    ("method", "backend", "processes"),
    [("dpo", ["cp"], 2), ("reward", ["sp_tp"], 4), ("dpo", ["cp", "--rotation", "alltoall"], 2)],
)
def test_a_step_of_pairs_whose_tokens_are_divided_is_traced(
    finetune: Finetune, tmp_path: Path, method: str, backend: list[str], processes: int
) -> None:
    """Tensor parallelism leaves one key head, which both processes of a row get."""
    file = recipe(
        tmp_path, LLAMA | {"num_hidden_layers": 5}, method=method,
        data=[{"source": "rows.jsonl", "format": "preference"}],
    )  # fmt: skip
    words = ["--backend", *backend, "--gpu", "H100-80", "--gpus", str(processes)]
    found = verification(finetune, file, *words)
    assert found["agrees"], found


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{"r": 4}, None], ids=["lora", "full"])
def test_a_score_head_leaves_the_embedding_a_unit_of_its_own(
    finetune: Finetune, tmp_path: Path, adapter: dict[str, int] | None
) -> None:
    """FSDP2 gathers it again before the backward pass of the first layer, though it is frozen."""
    file = recipe(
        tmp_path, WIDE | {"num_hidden_layers": 6, "tie_word_embeddings": True}, method="reward",
        data=[{"source": "rows.jsonl", "format": "preference"}], adapter=adapter,
        model={"activation_checkpointing": adapter is None},
    )  # fmt: skip
    words = ["--backend", "fsdp_full_shard", "--gpu", "H100-80", "--gpus", "2"]
    found = verification(finetune, file, *words)
    assert found["agrees"], found
    parts = {each["component"]: each["difference"] for each in found["components"]}
    assert parts["all-gathers, sent"] == pytest.approx(0, abs=1e-3)
    assert parts["peak"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("engine", "word"), [("zero3", "DeepSpeed's engine"), ("ddp", "DDP's")])
def test_an_engine_that_cannot_be_traced_is_named(engine: str, word: str, tmp_path: Path) -> None:
    settled = plan(catalog.load(recipe(tmp_path, LLAMA)), engine, 4)
    (note,) = notes(settled, sharded=False)
    assert note.startswith(word)
    assert "only the same work on one device was" in note
    assert alone(settled).accumulation == settled.accumulation
    assert alone(settled).processes == 1


UNKNOWN = {
    "model_type": "olmo2", "hidden_size": H, "num_hidden_layers": LAYER_COUNT,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": F,
    "vocab_size": VOCAB, "tie_word_embeddings": False,
}  # fmt: skip


def test_an_architecture_without_formulas_is_traced(finetune: Finetune, tmp_path: Path) -> None:
    file = recipe(tmp_path, UNKNOWN)
    done = finetune("plan", file, "--gpu", "H100-80", "--backend", "single", "--json")
    assert done.status == 0, done.output
    found = json.loads(done.stdout)["verification"]
    assert found["agrees"] is None
    assert all(each["predicted"] is None for each in found["components"])
    # Four square matrices, three of the feed-forward part, and norms: two after the branches, one
    # of all queries and one of all keys.
    layer = 4 * H * H + 3 * H * F + 4 * H
    assert traced(found)["parameters"] == LAYER_COUNT * layer + 2 * VOCAB * H + H


@pytest.mark.slow
def test_a_model_with_custom_attention_is_refused_with_how_to_trace_it(
    finetune: Finetune, tmp_path: Path
) -> None:
    config = {
        "model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256,
        "num_hidden_layers": 8, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    done = finetune("plan", recipe(tmp_path, config), "--backend", "single", "--verify")
    assert done.status == 2
    assert "falcon" in done.stderr
    assert "set model.attention=eager" in done.stderr


@pytest.mark.slow
def test_an_unknown_model_is_refused(finetune: Finetune, tmp_path: Path) -> None:
    file = recipe(tmp_path, UNKNOWN | {"model_type": "never_heard_of"})
    done = finetune("plan", file, "--gpu", "H100-80", "--backend", "single", "--verify")
    assert done.status == 2
    assert "model_type 'never_heard_of'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_that_needs_completions_is_refused(finetune: Finetune, assets: Path) -> None:
    words = [f"model.name={assets / 'configs/Qwen3-0.6B'}", "--backend", "single", "--verify"]
    done = finetune("plan", "qwen3_0_6b_grpo", *words, "--gpu", "H100-80")
    assert done.status == 2
    assert "--verify: a step of grpo needs sampled completions, which a trace does" in done.stderr


SHIPPED = [
    ("llama3_3_70b_qlora", "fsdp_full_shard", 64, "Llama-3-70B"),
    ("llama3_1_8b_full", "fsdp_full_shard", 8, "Llama-3.1-8B"),
    ("llama3_1_8b_qlora", "single", 1, "Llama-3.1-8B"),
    ("qwen3_0_6b_full", "single", 1, "Qwen3-0.6B"),
    ("smollm2_135m_lora", "ddp", 2, "SmolLM2-135M"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "machine", "gpus", "config"), SHIPPED)
def test_a_shipped_recipe_is_verified(
    finetune: Finetune, assets: Path, name: str, machine: str, gpus: int, config: str
) -> None:
    words = [f"model.name={assets / 'configs' / config}", "--backend", machine]
    words += ["--gpu", "H100-80", "--gpus", str(gpus), "--nodes", str(max(1, gpus // 8))]
    found = verification(finetune, name, *words)
    assert found["agrees"], found
