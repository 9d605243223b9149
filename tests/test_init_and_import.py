"""`finetune init` and `finetune import`: files to edit, and recipes of other toolkits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune import catalog, importers
from finetune.cli import main as cli
from finetune.errors import FinetuneError
from finetune.importers.recipe_file import render
from finetune.methods import METHODS, find_method
from finetune.recipe import Data, Recipe, Teacher


@pytest.mark.parametrize("name", list(catalog.names()))
def test_a_recipe_is_the_same_after_it_was_written_as_a_file(name, tmp_path):
    recipe = catalog.resolve(name)
    (tmp_path / "r.yaml").write_text(render(recipe, "As it was.", ["a note"]))
    assert catalog.load(tmp_path / "r.yaml") == recipe


def every_field(kind: type, values: dict[str, Any]) -> set[str]:
    names = {field.name for field in dataclasses.fields(kind)}
    inner = [value for value in values.values() if isinstance(value, dict)]
    return names.union(*(set(value) for value in inner))


NEEDED: dict[str, dict[str, Any]] = {
    "classifier": {"labels": ("no", "yes")},
    "distill": {"teacher": Teacher("big")},
}
"""Fields without which a method is not whole."""


@pytest.mark.parametrize("method", list(METHODS))
def test_every_field_is_written_and_becomes_valid_without_its_mark(method, tmp_path):
    recipe = find_method(method)(**NEEDED.get(method, {})).with_lora()
    recipe = recipe.with_data(catalog.resolve("quickstart").data[0])
    text = render(recipe, "Every field.", [])
    written = {line.lstrip("# -").split(":")[0] for line in text.splitlines() if ":" in line}
    assert every_field(type(recipe), catalog.to_fields(recipe)) <= written
    live = "\n".join(
        line.removeprefix("#") if _is_field(line) else line for line in text.split("\n")
    )
    (tmp_path / "r.yaml").write_text(live)
    assert catalog.load(tmp_path / "r.yaml") == dataclasses.replace(recipe, eval_data=SHOWN)


SHOWN = (Data("FILE_OR_HUB_ID", "messages"),)
"""What the comment about evaluation data becomes."""


def _is_field(line: str) -> bool:
    return line.startswith(("#  ", "#-")) or (line[:1] == "#" and line[1:2].isalpha())


def test_init_writes_a_file_that_is_found_by_its_name(finetune, tmp_path):
    done = finetune("init", "mine", "--from", "smollm2_135m_lora", cwd=tmp_path)
    assert (done.status, done.stdout.split(";")[0]) == (0, "wrote recipes/mine.yaml")
    shown = finetune("show", "mine", "--json", cwd=tmp_path)
    origin = catalog.resolve("smollm2_135m_lora")
    assert catalog.from_fields(json.loads(shown.stdout)) == origin
    said = finetune("init", "mine", cwd=tmp_path).refused()
    assert said.startswith("error: recipes/mine.yaml: already exists")
    assert catalog.load(tmp_path / "recipes/mine.yaml") == origin


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Run a command line in this process, in tmp_path: its status, and what it says of errors."""
    monkeypatch.chdir(tmp_path)
    return lambda words: (cli.main(words.split()), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("a/b", "'a/b': expected a name of letters, digits and _, or a path that ends in .yaml"),
        ("mine.py", "'mine.py': expected a name"),
        ("mine --from qwen3_0_6b_lra", "recipe 'qwen3_0_6b_lra': unknown; did you mean"),
    ],
)
def test_init_refuses_what_cannot_be_a_recipe(typed, tmp_path, words, told):
    status, said = typed(f"init {words}")
    assert status == 2
    assert said.startswith(f"error: {told}")
    assert list(tmp_path.iterdir()) == []


QLORA = """
{
base_model: NousResearch/Llama-3.2-1B, model_type: LlamaForCausalLM,
load_in_8bit: false, load_in_4bit: true, strict: false,
datasets: [
  {path: teknium/GPT4-LLM-Cleaned, type: alpaca},
  {path: data/chat.jsonl, ds_type: json, type: chat_template, field_messages: talk,
   message_property_mappings: {role: from, content: value}, roles_to_train: [assistant],
   train_on_eos: turn, split: "train[:1000]"}],
dataset_prepared_path: last_run_prepared, val_set_size: 0.1, output_dir: ./outputs/qlora-out,
adapter: qlora, lora_model_dir: null, sequence_len: 2048, sample_packing: true,
eval_sample_packing: true, pad_to_sequence_len: true, lora_r: 32, lora_alpha: 16,
lora_dropout: 0.05, lora_target_modules: [gate_proj, q_proj], lora_fan_in_fan_out: null,
wandb_project: mine, wandb_entity: null, gradient_accumulation_steps: 4, micro_batch_size: 2,
num_epochs: 3, optimizer: adamw_bnb_8bit, lr_scheduler: cosine, learning_rate: 2e-4,
train_on_inputs: false, group_by_length: false, bf16: auto, tf32: false,
gradient_checkpointing: true, logging_steps: 1, flash_attention: true,
loss_watchdog_threshold: 5.0, warmup_steps: 10, evals_per_epoch: 4, saves_per_epoch: 1,
weight_decay: 0.1, deepspeed: zero.json, special_tokens: {pad_token: "<|end_of_text|>"}}
"""
FULL = """
{
base_model: Qwen/Qwen3-8B,
datasets: [{path: my/stories, type: completion, field: story, name: long}],
test_datasets: [
  {path: json, data_files: [held.jsonl], ds_type: json, type: completion, field: story}],
sequence_len: 4096, micro_batch_size: 1, gradient_accumulation_steps: 8, max_steps: 500,
optimizer: adamw_torch_fused, lr_scheduler: linear, learning_rate: 1e-5, warmup_ratio: 0.1,
adam_beta2: 0.95, max_grad_norm: 0.3, bf16: true, fsdp_version: 2,
fsdp_config: {offload_params: true, reshard_after_forward: true,
  transformer_layer_cls_to_wrap: Qwen3DecoderLayer},
eval_steps: 50, save_steps: 100, save_total_limit: 3, early_stopping_patience: 4, seed: 7,
chat_template: llama3}
"""
LLAMA = """
{ ### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct, trust_remote_code: true,
quantization_bit: 4, quantization_method: bnb,
### method
stage: sft, do_train: true, finetuning_type: lora, lora_rank: 16, lora_target: "q_proj,v_proj",
lora_dropout: 0.1, deepspeed: examples/deepspeed/ds_z3_offload_config.json,
### dataset
dataset: "identity,talks", dataset_dir: data, template: llama3, cutoff_len: 1024,
max_samples: 1000, overwrite_cache: true, preprocessing_num_workers: 16,
### output
output_dir: saves/llama3-8b/lora/sft, logging_steps: 10, save_steps: 500, plot_loss: true,
report_to: none,
### train
per_device_train_batch_size: 1, gradient_accumulation_steps: 8, learning_rate: 1.0e-4,
num_train_epochs: 2.0, lr_scheduler_type: cosine, warmup_ratio: 0.1, bf16: true,
ddp_timeout: 180000000, neat_packing: true,
### eval
val_size: 64, per_device_eval_batch_size: 4, eval_strategy: steps, eval_steps: 500,
use_galore: true}
"""
LLAMA_FULL = """
{
model_name_or_path: models/mine, stage: pt, finetuning_type: full, dataset: books,
eval_dataset: books_held, template: default, learning_rate: 2e-5, packing: true, fp16: true,
disable_gradient_checkpointing: true, optim: lion_8bit, report_to: [wandb, swanlab]}
"""
INFO = {
    "identity": {"file_name": "identity.json"},
    "talks": {"hf_hub_url": "my/talks", "subset": "long", "formatting": "sharegpt",
        "columns": {"messages": "turns", "system": "preamble"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
            "assistant_tag": "assistant", "system_tag": "system"}},
    "books": {"file_name": "books.jsonl", "columns": {"prompt": "body"}},
    "books_held": {"file_name": "held.jsonl", "columns": {"prompt": "body"}},
    "pairs": {"file_name": "p.json", "ranking": True},
    "judged": {"file_name": "k.json", "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content"}},
    "compared": {"file_name": "c.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "talk", "chosen": "chosen", "rejected": "rejected"}},
}  # fmt: skip
FILES = {"qlora": QLORA, "full": FULL, "llama": LLAMA, "llama_full": LLAMA_FULL}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "zero.json").write_text(json.dumps(zero))
    for name, text in FILES.items():
        (tmp_path / f"{name}.yml").write_text(text)
    return tmp_path


def imported(path: Path, processes: int = 1) -> tuple[Recipe, dict[str, tuple[str, str]]]:
    recipe, job, _ = importers.import_recipe(path, processes)
    return recipe, dict(job.outcomes)


TEXT: dict[str, Any] = {"format": "text", "columns": {"story": "text"}}
BODY: dict[str, Any] = {"format": "text", "columns": {"body": "text"}}
MEANT: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "qlora": (4,
        {"method": "sft",
            "model": {"name": "NousResearch/Llama-3.2-1B", "quantization": "nf4",
                "attention": "flash_attention_2", "activation_checkpointing": True,
                "special_tokens": {"pad_token": "<|end_of_text|>"}},
            "data": [{"source": "teknium/GPT4-LLM-Cleaned", "format": "alpaca"},
                {"source": "data/chat.jsonl", "format": "sharegpt",
                    "split": "train[:1000]", "columns": {"talk": "conversations"}}],
            "adapter": {"r": 32, "alpha": 16, "dropout": 0.05, "targets": ["gate_proj", "q_proj"]},
            "batch": {"rows": 32, "micro_rows": 2, "max_length": 2048, "overlong": "drop",
                "packing": True},
            "optim": {"lr": 2e-4, "warmup": 10, "weight_decay": 0.1, "max_loss": 5.0},
            "eval_rows": 0.1, "evaluation": {"every": 0.083333}, "saving": {"every": 0.333333},
            "epochs": 3, "seed": 42, "trackers": ["wandb"], "backend": "zero2_offload"},
        "", "datasets.0.type optimizer"),
    "full": (8,
        {"method": "sft", "train_on": "all", "model": {"name": "Qwen/Qwen3-8B"},
            "data": [{"source": "my/stories", "subset": "long", **TEXT}],
            "eval_data": [{"source": "held.jsonl", **TEXT}],
            "batch": {"rows": 64, "micro_rows": 1, "max_length": 4096, "overlong": "drop"},
            "optim": {"lr": 1e-5, "schedule": "linear", "warmup": 0.1, "betas": [0.9, 0.95],
                "max_grad_norm": 0.3}, "evaluation": {"every": 50, "patience": 4},
            "saving": {"every": 100, "keep": 3}, "max_steps": 500, "seed": 7,
            "backend": "fsdp_full_shard_offload"}, "", "chat_template"),
    "llama": (2,
        {"method": "sft",
            "model": {"name": "meta-llama/Meta-Llama-3-8B-Instruct", "quantization": "nf4",
                "trust_remote_code": True, "activation_checkpointing": True},
            "data": [{"source": "FOLDER/data/identity.json", "format": "alpaca", "first": 1000},
                {"source": "my/talks", "format": "messages", "subset": "long", "first": 1000,
                    "columns": {"turns": "messages", "preamble": "system"}}], "eval_rows": 64,
            "adapter": {"r": 16, "dropout": 0.1, "targets": ["q_proj", "v_proj"]},
            "batch": {"rows": 16, "micro_rows": 1, "max_length": 1024, "overlong": "truncate",
                "packing": True}, "optim": {"lr": 1e-4, "warmup": 0.1},
            "evaluation": {"every": 500, "micro_rows": 4}, "saving": {"every": 500}, "epochs": 2,
            "seed": 42, "backend": "zero3_offload"}, "use_galore", "max_samples template"),
    "llama_full": (1,
        {"method": "pretrain", "model": {"name": "models/mine"},
            "data": [{"source": "FOLDER/data/books.jsonl", **BODY}],
            "eval_data": [{"source": "FOLDER/data/held.jsonl", **BODY}],
            "batch": {"rows": 8, "micro_rows": 8, "max_length": 2048, "overlong": "truncate",
                "packing": True}, "optim": {"lr": 2e-5, "schedule": "linear", "warmup": 0},
            "epochs": 3, "seed": 42,
            "trackers": ["wandb", "accelerate.tracking:SwanLabTracker"]}, "optim",
        "packing fp16 template"),
}  # fmt: skip
"""Processes, the recipe that means the same, keys without a counterpart, keys that differ."""


@pytest.mark.parametrize("name", MEANT)
def test_an_imported_file_is_the_recipe_that_means_the_same(folder, name):
    processes, meant, missing, differs = MEANT[name]
    recipe, said = imported(folder / f"{name}.yml", processes)
    fields = json.loads(json.dumps(meant).replace("FOLDER", str(folder)))
    assert recipe == catalog.from_fields(fields)
    for outcome, keys in (("no counterpart", missing), ("differs", differs)):
        assert {key for key, (kind, _) in said.items() if kind == outcome} == set(keys.split())


@pytest.mark.parametrize(
    ("lines", "path", "value"),
    [
        ("evals_per_epoch: 4\nval_set_size: 0.1", "evaluation.every", 0.25),
        ("evals_per_epoch: 4", "evaluation", None),  # nothing is held out
        ("save_strategy: epoch", "saving.every", "1 epoch"),
        ("save_steps: 0.05", "saving.every", 0.05),
        ("lr_scheduler: polynomial\nlr_scheduler_kwargs: {power: 2}",
            "optim.schedule_arguments.power", 2),
        ("optimizer: adamw_bnb_8bit", "optim.name", "adamw_8bit"),
        ("optimizer: adamw_bnb_8bit\nfsdp: [full_shard]", "optim.name", "adamw_8bit"),
        ("optimizer: ao_adamw_4bit", "optim.name", "adamw_4bit"),
        ("loraplus_lr_ratio: 16", "optim.loraplus_lr_ratio", 16),
        ("embedding_lr: 1e-5", "optim.groups",
            [{"match": "embed_tokens|lm_head", "lr": 1e-5}]),
        ("lr_groups: [{name: o, modules: [self_attn.o_proj], lr: 1e-5}]", "optim.groups",
            [{"match": "self_attn\\.o_proj", "lr": 1e-5}]),
        ("optimizer: rmsprop", "optim.name", "torch.optim:RMSprop"),
        ("tensor_parallel_size: 2", "backend", "tp"),
        ("dp_shard_size: 4\ndp_replicate_size: 2", "backend", "hsdp"),
        ("context_parallel_size: 8", "backend", "cp"),
        ("activation_offloading: true", "model.activation_checkpointing", "offload"),
        ("tokens: {eos_token: <e>}", "model.special_tokens.eos_token", "<e>"),
        ("tokens: [<e>]", "model.add_tokens", ["<e>"]),
        ("micro_batch_size: 2\nbatch_size: 8", "batch.rows", 16),
        ("reward_model: true\ndatasets: [{path: d, type: bradley_terry.chat_template}]",
            "data.0.columns.input", "prompt"),
        ("model_config: {output_router_logits: true, router_aux_loss_coef: 0.01}",
            "model.router_aux_loss", 0.01),
        ("bnb_config_kwargs: {bnb_4bit_use_double_quant: true}", "batch.rows", 2),
        ("datasets: [{path: d, type: chat_template, field_thinking: thinking,"
            " template_thinking_key: thinking}]", "data.0.format", "messages"),
        ("rl: dpo\ndatasets: [{path: d, type: chat_template.default, roles: {user: [user]},"
            " message_property_mappings: {role: role, content: content}}]", "method", "dpo"),
        ("unfrozen_parameters: [lm_head.*, 'model.layers.2[0-9]+']", "model.trainable",
            ["lm_head.*", "model.layers.2[0-9]+"]),
        ("noisy_embedding_alpha: 5", "model.neftune_alpha", 5),
        ("use_eaft: true\neaft_alpha: 2", "token_weight", "eaft"),
        ("label_smoothing_factor: 0.1", "label_smoothing", 0.1),
        ("datasets: [{path: a/b, type: completion, split: 'train[:5%]'}]", "data.0.split",
            "train[:5%]"),
        ("min_sample_len: 20", "batch.min_length", 20),
        ("dataset_exact_deduplication: true", "duplicates", "drop"),
        ("model_config: {output_router_logits: true}", "model.router_aux_loss", "on"),
        ("cosine_min_lr_ratio: 1.0", "optim.schedule", "constant"),
        ("model_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs: "
            "{dequantize: true}", "model.name", "m"),
        ("datasets: [{path: d, type: chat_template, field_messages: talk, field_thinking: why,"
            " message_property_mappings: {role: speaker, content: said}}]", "data.0.columns",
            {"talk": "messages", "talk[].speaker": "role", "talk[].said": "content",
                "talk[].why": "reasoning_content"}),
        ("datasets: [{path: d, type: chat_template, roles: {assistant: [bot], user: [user]}}]",
            "data.0.roles", {"bot": "assistant"}),
        ("processor_type: AutoProcessor\nskip_prepare_dataset: true", "model.reads", ["image"]),
        ("processor_type: AutoProcessor", "model.trains", ["language", "connector", "tower"]),
        ("processor_type: AutoProcessor\nadapter: lora\nlora_target_modules: "
            "model.language_model.layers.*q_proj", "model.trains", ["language"]),
    ],
)  # fmt: skip
def test_what_public_configurations_use_is_translated(tmp_path, lines, path, value):
    (tmp_path / "f.yml").write_text(f"base_model: m\n{lines}")
    _, job, _ = importers.import_recipe(tmp_path / "f.yml", 2)
    found: Any = job.fields
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else found.get(part)
    assert (found or None) == value
    assert "no counterpart" not in {outcome for outcome, _ in job.outcomes.values()}


def test_layers_that_are_not_frozen_are_named(tmp_path):
    model = "model_name_or_path: Qwen/Qwen2.5-0.5B\nfinetuning_type: freeze\n"
    lines = "freeze_trainable_layers: 3\nfreeze_trainable_modules: mlp,self_attn\n"
    for more, wanted in (
        (lines, [r".*\.(21|22|23)\.mlp", r".*\.(21|22|23)\.self_attn"]),
        ("freeze_trainable_layers: -1\nuse_dft_loss: true\n", [r".*\.(0)\."]),
    ):
        (tmp_path / "f.yml").write_text(f"{model}{more}stage: pt\n")
        recipe, job, _ = importers.import_recipe(tmp_path / "f.yml", 1)
        assert (recipe.adapter, recipe.model.trainable) == (None, tuple(wanted))
        assert "no counterpart" not in {outcome for outcome, _ in job.outcomes.values()}
        assert job.fields.get("token_weight", "none") == ("dft" if "dft" in more else "none")


def test_images_and_orthogonal_tuning_of_llama_factory_come_over(tmp_path):
    columns = {"messages": "messages", "images": "images"}
    seen = {"file_name": "seen.json", "formatting": "sharegpt", "columns": columns}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"seen": seen}))
    (tmp_path / "f.yml").write_text(
        f"model_name_or_path: m\nstage: sft\ndataset: seen\ndataset_dir: {tmp_path}\n"
        "finetuning_type: oft\noft_block_size: 16\nfreeze_vision_tower: false\n"
    )
    recipe, job, _ = importers.import_recipe(tmp_path / "f.yml", 1)
    assert (recipe.model.reads, recipe.model.trains) == (("image",), ("language", "tower"))
    assert recipe.adapter is not None
    assert (recipe.adapter.kind, recipe.adapter.arguments) == ("oft", {"oft_block_size": 16})
    assert "no counterpart" not in {outcome for outcome, _ in job.outcomes.values()}


@pytest.mark.parametrize("name", FILES)
def test_no_key_is_dropped_in_silence(folder, name):
    given = yaml.safe_load(FILES[name])
    given["a_key_of_tomorrow"] = 3
    (folder / "more.yml").write_text(yaml.safe_dump(given))
    _, said = imported(folder / "more.yml")
    roots = {key.split(".")[0] for key in said}
    assert roots == {key for key, value in given.items() if value is not None}
    assert said["a_key_of_tomorrow"][0] == "no counterpart"
    for at, entry in [(f"datasets.{i}", e) for i, e in enumerate(given.get("datasets", []))]:
        assert {f"{at}.{key}" for key in entry} <= said.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "full" in name else pytest.mark.slow) for name in FILES]
)
def test_any_value_is_imported_or_refused_with_a_sentence(folder, name):
    given = yaml.safe_load(FILES[name])
    refused = accepted = tried = 0
    for key in given:
        for value in ["word", -1, True, [], [1], {"a": 1}, [{}]]:
            (folder / "odd.yml").write_text(yaml.safe_dump({**given, key: value}))
            try:
                _, said = imported(folder / "odd.yml", 2)
            except FinetuneError as error:
                refused += str(error).startswith(f"{folder / 'odd.yml'}: ")
            else:
                accepted += key in {root.split(".")[0] for root in said} or value is None
            tried += 1
    assert refused + accepted == tried
    assert min(refused, accepted) > 10


def test_import_prints_the_outcome_of_each_key_and_writes_it_into_the_file(finetune, folder):
    done = finetune("import", "llama.yml", "--processes", "2", "--allow-lost", cwd=folder).passed()
    reason = "for the available optimizers, see optim.name"
    assert f"no counterpart  use_galore  {reason}" in done.stdout
    assert "assumed         batch.rows=16: rows of a step over all processes, assumed to be 2" in (
        done.stdout
    )
    text = (folder / "recipes/llama.yaml").read_text()
    assert f"# no counterpart use_galore {reason}" in text
    expected, _, _ = importers.import_recipe(Path(folder / "llama.yml"), 2)
    assert catalog.load(folder / "recipes/llama.yaml").batch == expected.batch
    assert "already exists" in finetune("import", "llama.yml", cwd=folder).refused()


def test_a_lost_key_ends_an_import_with_status_1_and_writes_nothing(typed, tmp_path):
    (tmp_path / "f.yml").write_text("base_model: m\nnoise_of_tomorrow: 3\nuse_swanlab: true")
    status, said = typed("import f.yml")
    assert status == 1
    assert said.startswith("not written: no counterpart for noise_of_tomorrow, which may change")
    assert [path.name for path in tmp_path.iterdir()] == ["f.yml"]
    assert typed("import f.yml --allow-lost --output g.yaml") == (0, "")
    assert catalog.load(tmp_path / "g.yaml").model.name == "m"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "f.yml: cannot be read as YAML: "),
        ("- 1", "f.yml: expected keys and values, got list"),
        ("lr: 3", "f.yml: not a configuration that can be imported: it has neither base_model"),
        ("base_model: m\nrl: grpo",
            "f.yml: rl: grpo: supervised fine-tuning, pretraining and rl of"),
        ("base_model: m\nadapter: oft", "f.yml: adapter: oft: expected lora or qlora"),
        ("base_model: m\nlearning_rate: fast", "f.yml: optim.lr: Input should be a valid number"),
        ("base_model: m\ndatasets: d", "f.yml: datasets: expected a list of sources, got d"),
        ("model_name_or_path: m\nstage: ppo",
            "f.yml: stage: ppo: sft, pt, rm, dpo and kto are imported"),
        ("model_name_or_path: m\nstage: dpo\npref_loss: kto_pair",
            "f.yml: pref_loss: kto_pair: expected one of sigmoid"),
        ("model_name_or_path: m\nfinetuning_type: lisa",
            "f.yml: finetuning_type: lisa: expected lora, oft, full or freeze"),
        ("model_name_or_path: m\ndataset: d", "f.yml: dataset_dir: data: no dataset_info.json"),
    ],
)  # fmt: skip
def test_import_errors_name_the_file_and_the_key(typed, tmp_path, text, told):
    (tmp_path / "f.yml").write_text(text)
    status, said = typed("import f.yml")
    assert status == 2
    assert said.startswith(f"error: {told}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.yml"]
    assert typed("import gone.yml") == (2, "error: gone.yml: No such file or directory\n")


def test_a_data_set_that_is_not_described_or_of_preferences_is_refused(folder):
    for name, told in (("identit", "did you mean 'identity'?"), ("pairs", "a preference data set")):
        (folder / "f.yml").write_text(f"model_name_or_path: m\ndataset: {name}")
        with pytest.raises(FinetuneError, match=f"dataset: {name}: .*") as caught:
            imported(folder / "f.yml")
        assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "method", "own", "data"),
    [
        (
            "base_model: m\nrl: dpo\nrl_beta: 0.2\ndpo_label_smoothing: 0.1\ndatasets:\n  - "
            "{path: d, type: chatml.intel}", "dpo",
            {"beta": 0.2, "label_smoothing": 0.1, "loss_type": "sigmoid"},
            ("d", "alpaca_preference", {"question": "instruction"})),
        ("base_model: m\nrl: ipo\ndatasets:\n  - {path: d, type: llama3.ultra}", "dpo",
            {"loss_type": "ipo"}, ("d", "preference", {})),
        (
            "base_model: m\nrl: orpo\norpo_alpha: 0.2\ndatasets:\n  - {path: d, type: "
            "chat_template.default, field_messages: talk}", "orpo", {"beta": 0.2},
            ("d", "preference", {"talk": "prompt"})),
        ("base_model: m\nrl: simpo\nrl_beta: 2\ndatasets:\n  - {path: d, type: chatml.ultra}",
            "simpo", {"beta": 2.0, "gamma": 0.5}, ("d", "preference", {})),
        (
            "base_model: m\nmicro_batch_size: 8\nrl: kto\nkto_undesirable_weight: "
            "1.5\ndatasets:\n  - {path: d, type: chatml.argilla}", "kto",
            {"undesirable_weight": 1.5},
            ("d", "kto", {"instruction": "question", "completion": "answer"})),
        ("model_name_or_path: m\nstage: dpo\npref_beta: 0.3\npref_ftx: 0.5\ndataset: compared",
            "dpo", {"beta": 0.3, "sft_weight": 0.5},
            ("data/c.json", "sharegpt_preference", {"talk": "conversations"})),
        ("model_name_or_path: m\nstage: dpo\npref_loss: simpo\nsimpo_gamma: 1.5\ndataset: pairs",
            "simpo", {"beta": 0.1, "gamma": 1.5}, ("data/p.json", "alpaca_preference", {})),
        ("model_name_or_path: m\nstage: kto\nkto_chosen_weight: 0.8\ndataset: judged", "kto",
            {"desirable_weight": 0.8}, ("data/k.json", "kto", {"label": "kto_tag"})),
    ],
)  # fmt: skip
def test_methods_of_preferences_are_imported(folder, text, method, own, data):
    (folder / "f.yml").write_text(text)
    recipe, said = imported(folder / "f.yml")
    assert (recipe.method, {name: getattr(recipe, name) for name in own}) == (method, own)
    (source,) = recipe.data
    where, name, columns = data
    assert (source.source.removeprefix(f"{folder}/"), source.format) == (where, name)
    assert dict(source.columns) == columns
    assert not {key for key, (kind, _) in said.items() if kind == "no counterpart"}
    assert not any(told == "no recipe field corresponds to it" for _, told in said.values())
