"""What is handed over stops where it was trained to, and holds every tensor of the model."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import slow, slow_but
from peft import AutoPeftModelForCausalLM
from preference import merged, written
from safetensors.torch import load_file, save_file
from tiny_run import (
    CHATML,
    SIZES,
    byte_tokenizer,
    disturb,
    logits,
    relative,
    save_base,
    save_checkpoint,
    start_run,
    tiny_llama,
    trained_adapter,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.checkpoints import pretrained
from finetune.checkpoints.stop_tokens import (
    base_reference,
    saved_tokenizer,
    without_generation_tags,
)
from finetune.exporters.export import export
from finetune.inference.generate import load, load_folder
from finetune.recipe import LoRA, Model
from finetune.runs.run import Run

ROUNDING = 1e-5
ANSWER = "ok."
END, TURN_END = 256, 259  # `<|end|>`, the tokenizer's eos, and `<|im_end|>`, that of the template


def fields(folder: Path, base: Path, **sections: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ANSWER}]
    rows = written(folder / "rows.jsonl", [{"messages": turns}] * 4)
    given: dict[str, Any] = {
        "method": "sft", "model": {"name": str(base)}, "max_steps": 1,
        "data": [{"source": str(rows), "format": "messages"}],
        "batch": {"rows": 2, "micro_rows": 1, "max_length": 64},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup": 0},
    }  # fmt: skip
    return merged(given, sections)


@pytest.fixture
def trained(train, tmp_path) -> Callable[..., Run]:
    """A run that starts from the base in tmp_path/base."""
    base = tmp_path / "base"
    return lambda **sections: train(fields=fields(tmp_path, base, **sections))


def assert_as_written(folder: Path, base: Path) -> dict[str, torch.Tensor]:
    """The names, shapes and types are those of the base, and its biases unchanged."""
    found, given = (load_file(each / "model.safetensors") for each in (folder, base))
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in given.items()
    }
    biases = [name for name in found if name.endswith("correction_bias")]
    assert all(torch.equal(found[name], given[name]) for name in biases)
    return {name: found[name] for name in biases}


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


# --- the model stops ---------------------------------------------------------------------------


TEMPLATE = CHATML.replace(
    "{{ message['content'] }}<|im_end|>\n",
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}\n{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}",
)


@pytest.mark.parametrize("adapter", [slow(None), {"r": 8}])
def test_plain_transformers_stops_where_the_trained_answer_ends(tmp_path, trained, adapter):
    save_base(tiny_llama(), tmp_path / "base")
    before = os.umask(0o027)
    try:
        run = trained(adapter=adapter, max_steps=25)
        exports = {"final": run.final, "plain": export(run, tmp_path / "plain")}
        if adapter:
            exports["merged"] = export(run, tmp_path / "merged", merge=True)
    finally:
        os.umask(before)
    saved = run.checkpoint(25)
    assert modes(saved) == {0o640}
    for name, folder in exports.items():
        assert modes(folder) == {0o640}
        texts = [path for path in folder.iterdir() if path.suffix in (".json", ".md", ".jinja")]
        assert {path.name for path in texts if str(tmp_path) in path.read_text()} <= {
            "adapter_config.json"  # the base is a folder here, and no hub name serves
        }
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [END, TURN_END]
        assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"
        whole = name == "merged" or adapter is None
        auto = AutoModelForCausalLM if whole else AutoPeftModelForCausalLM
        more = {} if whole else {"generation_config": GenerationConfig.from_pretrained(folder)}
        assert said(auto.from_pretrained(folder), folder, **more) == ANSWER + "<|im_end|>"
        if whole:
            config = json.loads((folder / "config.json").read_text())
            assert (config["use_cache"], config["eos_token_id"]) == (True, [END, TURN_END])
            assert config["architectures"] == ["LlamaForCausalLM"]
        assert load_folder(folder).stops == (END, TURN_END)
    of_weights = saved / ("adapter" if adapter else "model")
    assert GenerationConfig.from_pretrained(of_weights).eos_token_id == [END, TURN_END]


def said(model: Any, folder: Path, **more: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False, **more)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_rows_that_end_with_the_eos_stop_at_it_and_at_the_end_of_a_turn(tmp_path, trained):
    save_base(tiny_llama(), tmp_path / "base")
    rows = written(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": " b"}])
    data = [{"source": str(rows), "format": "prompt_completion"}]
    run = trained(data=data, batch={"rows": 1})
    assert GenerationConfig.from_pretrained(run.final).eos_token_id == [END, TURN_END]
    assert AutoTokenizer.from_pretrained(run.final).eos_token == "<|end|>"


def rendered(messages: list[dict[str, str]], template: str, header: bool = False) -> str:
    texts = render_jinja_template([messages], chat_template=template, add_generation_prompt=header)
    return texts[0][0]


def test_training_tags_are_removed_from_an_exported_template(tmp_path):
    base = tiny_llama()
    run = start_run(tmp_path / "run", save_base(base, tmp_path / "base"))
    save_checkpoint(run, 10, base, TEMPLATE)
    folder = export(run, tmp_path / "out")
    template = AutoTokenizer.from_pretrained(folder).chat_template
    assert "generation %}" not in template
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for header in (False, True):
        assert rendered(asked, template, header) == rendered(asked, TEMPLATE, header)


def test_named_templates_lose_their_training_tags_too():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATE}
    saved = saved_tokenizer(tokenizer, TURN_END)
    assert saved.chat_template == dict.fromkeys(
        ("default", "tool_use"), without_generation_tags(TEMPLATE)
    )
    assert saved.eos_token == "<|im_end|>"


@pytest.mark.parametrize("opening", ["{% generation %}", "{%- generation -%}", "{%+ generation%}"])
@pytest.mark.parametrize("closing", ["{% endgeneration %}", "{%-endgeneration-%}"])
def test_a_template_without_tags_writes_the_same_spaces(opening, closing):
    template = f"{{% for m in messages %}}\n  {opening}\n  {{{{ m.role }}}} \n {closing}\n\n x\n"
    template += "{% endfor %}"
    stripped = without_generation_tags(template)
    assert "generation" not in stripped
    assert rendered([{"role": "user"}], stripped) == rendered([{"role": "user"}], template)


# --- every tensor ------------------------------------------------------------------------------


LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 0,
}  # fmt: skip


EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}


def tiny(kind: str, folder: Path | None = None, **fields: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):  # as pretraining leaves it: not zero
            buffer.copy_(torch.linspace(-1, 1, len(buffer)))
    if folder is not None:
        save_base(model, folder)
    return model


WRITTEN = {
    "deepseek_v3": LATENT,  # with buffers
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},  # transposed, and tied
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},  # experts in one tensor
    "mamba": {"state_size": 4, "time_step_rank": 4, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("kind", slow_but(("gpt2", "mixtral"), WRITTEN))
def test_a_result_has_every_tensor_that_save_pretrained_writes(tmp_path, trained, kind):
    """In the names and shapes of its base."""
    base = tmp_path / "base"
    tiny(kind, base, **WRITTEN[kind])
    sections: dict[str, Any] = {"kernels": {"head": "whole"}} if kind != "deepseek_v3" else {}
    run = trained(**sections, model={"attention": "eager"} if kind == "mamba" else {})
    for folder in (run.final, run.checkpoint(1) / "model", export(run, tmp_path / "plain")):
        assert len(assert_as_written(folder, base)) == (2 if kind == "deepseek_v3" else 0)
    model = load(run).model
    assert relative(logits(AutoModelForCausalLM.from_pretrained(run.final)), logits(model)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "precision"), [("fsdp_full_shard", "fp32"), ("zero3", "bf16")])
def test_the_result_of_a_sharded_run_has_every_tensor_too(tmp_path, run_of, backend, precision):
    base = tmp_path / "base"
    model = tiny("deepseek_v3", base, **LATENT)
    if precision == "bf16":  # as published: weights in bf16, what routes the experts in fp32
        pretrained.cast(model, torch.bfloat16)
        model.save_pretrained(base)
    run = run_of(backend, "--precision", precision, fields=fields(tmp_path, base))
    assert_as_written(run.final, base)
    generation = GenerationConfig.from_pretrained(run.final)
    assert generation.eos_token_id == [END, TURN_END]


def test_experts_from_scratch_are_written_as_the_hub_has_them(tmp_path, trained):
    plain = tiny("qwen3_moe", tmp_path / "plain", **EXPERTS)
    config = {**plain.config.to_diff_dict(), "model_type": "qwen3_moe"}
    model = {"name": None, "config": config, "tokenizer": str(tmp_path / "plain")}
    found = load_file(trained(model=model).final / "model.safetensors")
    assert found.keys() == load_file(tmp_path / "plain" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in found


def test_a_router_trained_whole_is_exported_with_its_buffer(tmp_path, trained):
    tiny("deepseek_v3", tmp_path / "base", **LATENT)
    adapter = {"r": 2, "targets": ["q_a_proj"], "modules_to_save": ["mlp.gate"]}
    folder = export(trained(adapter=adapter), tmp_path / "merged", merge=True)
    merged, given = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "base"))
    assert merged.keys() == given.keys()
    gate = "model.layers.0.mlp.gate"
    for name, same in ((f"{gate}.e_score_correction_bias", True), (f"{gate}.weight", False)):
        assert torch.equal(merged[name], given[name]) == same


KINDS = {
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "mamba": {"state_size": 4, "time_step_rank": 4},
}
TARGETS = {"bloom": ["query_key_value"], "mamba": ["in_proj", "x_proj"]}


@pytest.mark.parametrize("kind", KINDS)
def test_models_without_sdpa_are_merged_and_read_back(tmp_path, kind):
    base = tiny(kind, tmp_path / "base", **KINDS[kind])
    attention = "sdpa" if kind in ("gemma2", "mamba") else "eager"  # as packed rows have it
    run = start_run(tmp_path / "run", tmp_path / "base", LoRA(r=4), attention=attention)
    model = trained_adapter(base, target_modules=TARGETS.get(kind, ["q_proj", "v_proj"]))
    now = logits(model)
    save_checkpoint(run, 10, model)
    merged = export(run, tmp_path / "merged", merge=True)
    assert relative(logits(AutoModelForCausalLM.from_pretrained(merged)), now) < ROUNDING
    assert relative(logits(load(run).model), now) < ROUNDING
    assert relative(logits(load_folder(merged).model), now) < ROUNDING
    assert relative(logits(load_folder(export(run, tmp_path / "out")).model), now) < ROUNDING


def test_a_step_that_is_not_the_best_is_exported_as_it_was_then(tmp_path):
    base = tiny_llama()
    run = start_run(tmp_path / "run", save_base(base, tmp_path / "base"), LoRA(r=4))
    model = trained_adapter(base)
    then = logits(model)
    save_checkpoint(run, 5, model)
    disturb(model)
    save_checkpoint(run, 10, model)
    folder = export(run, tmp_path / "out", step=5)
    assert relative(logits(load_folder(folder).model), then) < ROUNDING
    assert "The weights are those of step 5" in (folder / "README.md").read_text()


# --- names -------------------------------------------------------------------------------------


def test_a_folder_of_the_hubs_cache_is_named_by_its_repository_and_commit(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--someone--tiny-1.5B" / "snapshots" / commit
    folder.mkdir(parents=True)
    assert base_reference(Model(str(folder))) == ("someone/tiny-1.5B", commit)
    assert base_reference(Model("someone/tiny", revision="v2")) == ("someone/tiny", "v2")
    assert base_reference(Model(str(tmp_path))) == (str(tmp_path), None)


def test_the_tokenizer_keeps_its_eos_where_the_template_writes_it(tmp_path):
    """Another `eos_token` would change what the template renders."""
    base = tiny_llama()
    run = start_run(tmp_path / "run", save_base(base, tmp_path / "base"))
    save_checkpoint(run, 10, base, "{{ eos_token }}" + CHATML)
    folder = export(run, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(folder).eos_token == byte_tokenizer().eos_token
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [END, TURN_END]


def test_a_model_with_code_of_its_own_is_handed_over_with_that_code(tmp_path, trained):
    base = save_base(tiny_llama(), tmp_path / "base")
    (base / "modeling_tiny.py").write_text(
        "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class TinyConfig(LlamaConfig):\n    model_type = 'tiny_of_its_own'\n\n\n"
        "class TinyForCausalLM(LlamaForCausalLM):\n    config_class = TinyConfig\n\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.spare = torch.nn.Linear(2, 3)\n"
    )
    tensors = load_file(base / "model.safetensors")
    spare = {"spare.weight": torch.arange(6.0).view(3, 2), "spare.bias": torch.ones(3)}
    save_file(tensors | spare, base / "model.safetensors", metadata={"format": "pt"})
    classes = {"AutoConfig": "TinyConfig", "AutoModelForCausalLM": "TinyForCausalLM"}
    config = json.loads((base / "config.json").read_text())
    config["model_type"] = "tiny_of_its_own"
    config["auto_map"] = {auto: f"modeling_tiny.{name}" for auto, name in classes.items()}
    (base / "config.json").write_text(json.dumps(config))
    run = trained(model={"trust_remote_code": True})
    for folder in (run.final, export(run, tmp_path / "out")):
        assert (folder / "modeling_tiny.py").is_file()
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(loaded).__name__ == "TinyForCausalLM"
        found = load_file(folder / "model.safetensors")  # what no gradient reaches as well
        assert all(torch.equal(found[name], tensor) for name, tensor in spare.items())
        assert relative(logits(loaded), logits(load(run).model)) == 0
        assert "trust_remote_code=True" in (folder / "README.md").read_text()
