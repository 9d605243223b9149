"""Configurations and commands of TRL, ms-swift, torchtune and Trainer become recipes."""

import copy
import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import problems_of, written

from finetune import catalog, importers
from finetune.cli import main as cli
from finetune.errors import FinetuneError
from finetune.importers import command_line
from finetune.methods.distill import Distill
from finetune.recipe import Group
from finetune.rewards import Reward

Lost = set[str]

TRL = """
# a comment
export MODEL=org/base
CUDA_VISIBLE_DEVICES=0 accelerate launch --num_processes=2 --config_file zero3.yaml \\
    trl/scripts/sft.py --model_name_or_path $MODEL --dataset_name org/talks \\
    --dataset_train_split train_sft --eval_strategy steps --eval_steps 50 \\
    --dataset_test_split held --learning_rate 2.0e-4 --packing --assistant_only_loss \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 1 \\
    --use_peft --lora_r 32 --lora_target_modules q_proj v_proj --load_in_4bit \\
    --use_bnb_nested_quant --no_remove_unused_columns --eos_token "<|im_end|>" --report_to none
"""
SWIFT = """
nproc=2
NPROC_PER_NODE=$nproc swift rlhf --rlhf_type dpo --model org/base --tuner_type full \\
  --dataset pairs.jsonl#400 --split_dataset_ratio 0.01 --learning_rate 1e-5 --beta 0.2 \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps $(expr 16 / $nproc) \\
  --max_length 1024 --deepspeed zero2 --eval_steps 20 --freeze_vit true --dataset_num_proc 4 \\
  --template qwen --model_author me --warmup_ratio 0.05
"""
TUNE: dict[str, Any] = {
    "output_dir": "/tmp/out",
    "model": {
        "_component_": "torchtune.models.llama3_1.qlora_llama3_1_8b",
        "lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": True,
        "apply_lora_to_output": False, "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0,
    },
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "t",
        "max_seq_len": 512},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "models/llama", "output_dir": "${output_dir}"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": False,
        "split": "train[:95%]"},
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 3e-4},
    "lr_scheduler": {"num_warmup_steps": 100,
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "epochs": 1, "max_steps_per_epoch": 30, "batch_size": 2, "batch_size_val": "${batch_size}",
    "gradient_accumulation_steps": 8, "clip_grad_norm": None, "seed": 5, "dtype": "bf16",
    "enable_activation_checkpointing": True, "enable_activation_offloading": False,
}  # fmt: skip
LOADED = {"model": {"name": "org/base", "activation_checkpointing": True}}
MEANT: dict[str, tuple[str, dict[str, Any]]] = {
    "trl.sh": (TRL, {
        "method": "sft", "backend": "ddp", "epochs": 1, "seed": 42,
        "model": LOADED["model"] | {"quantization": "nf4",
            "special_tokens": {"eos_token": "<|im_end|>"}},
        "data": [{"source": "org/talks", "format": "messages", "split": "train_sft"}],
        "eval_data": [{"source": "org/talks", "format": "messages", "split": "held"}],
        "adapter": {"r": 32, "alpha": 32, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
        "batch": {"rows": 16, "micro_rows": 4, "packing": True, "overlong": "truncate"},
        "optim": {"lr": 2e-4, "schedule": "linear", "warmup": 0}, "evaluation": {"every": 50}}),
    "swift.sh": (SWIFT, {
        "method": "dpo", "beta": 0.2, "backend": "zero2", "epochs": 3, "seed": 42, **LOADED,
        "data": [{"source": "pairs.jsonl", "format": "preference", "first": 400}],
        "eval_rows": 0.01, "evaluation": {"every": 20},
        "batch": {"rows": 32, "micro_rows": 2, "max_length": 1024, "overlong": "drop"},
        "optim": {"lr": 1e-5, "warmup": 0.05, "weight_decay": 0.1, "betas": [0.9, 0.95]}}),
    "tune.yaml": (yaml.safe_dump(TUNE), {
        "method": "sft", "train_on": "all", "max_steps": 30, "seed": 5,
        "model": {"name": "models/llama", "quantization": "nf4", "activation_checkpointing": True},
        "data": [{"source": "yahma/alpaca-cleaned", "format": "alpaca", "split": "train[:95%]"}],
        "adapter": {"r": 8, "alpha": 16,
            "targets": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
        "batch": {"rows": 16, "micro_rows": 2, "max_length": 512, "overlong": "truncate"},
        "evaluation": {"micro_rows": 2},
        "optim": {"lr": 3e-4, "warmup": 100, "weight_decay": 0.01, "max_grad_norm": None}}),
}  # fmt: skip
"""A file of each toolkit, and the recipe that means the same."""


@pytest.mark.parametrize("name", MEANT)
def test_a_file_is_the_recipe_that_means_the_same(tmp_path, name):
    text, meant = MEANT[name]
    (tmp_path / name).write_text(text)
    recipe, job, _ = importers.import_recipe(tmp_path / name)
    assert recipe == catalog.from_fields(meant)
    assert job.lost == []


@pytest.mark.parametrize("name", MEANT)
def test_an_unknown_key_is_lost(tmp_path, name):
    text, _ = MEANT[name]
    unknown = "\nof_tomorrow: 1\n" if name == "tune.yaml" else " --of_tomorrow 1\n"
    (tmp_path / name).write_text(text.rstrip() + unknown)
    _, job, _ = importers.import_recipe(tmp_path / name)
    assert job.lost == ["of_tomorrow"]
    assert job.outcomes.keys() >= job.source.keys()


def test_a_command_after_two_dashes_is_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("dataset_name: org/pairs\nbeta: 0.3\nlearning_rate: 1e-5")
    words = "trl dpo --config c.yaml --model_name_or_path org/base --learning_rate 2e-6"
    assert cli.main(["import", "--output", "mine.yaml", "--", *words.split()]) == 0
    recipe = catalog.load(Path("mine.yaml"))
    assert (recipe.method, recipe.beta, recipe.optim.lr) == ("dpo", 0.3, 2e-6)
    assert recipe.data[0].source == "org/pairs"
    assert "trl dpo" not in capsys.readouterr().err


def test_saved_training_arguments_give_everything_but_model_and_data(tmp_path):
    from transformers import TrainingArguments

    given = TrainingArguments(
        str(tmp_path), learning_rate=3e-5, per_device_train_batch_size=4, warmup_steps=7,
        gradient_accumulation_steps=4, lr_scheduler_type="cosine", use_cpu=True, report_to="none",
    )  # fmt: skip
    (tmp_path / "args.json").write_text(given.to_json_string())
    recipe, job, toolkit = importers.import_recipe(tmp_path / "args.json")
    assert toolkit == "TrainingArguments"
    assert (recipe.optim.lr, recipe.optim.warmup, recipe.optim.schedule) == (3e-5, 7, "cosine")
    assert (recipe.batch.rows, recipe.epochs) == (16, 3)
    assert job.lost == []


def test_the_format_of_data_that_is_here_is_that_of_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(Path("rows.jsonl"), [{"query": "a", "response": "b"}])
    written(Path("asked.jsonl"), [{"prompt": "a", "completion": "b"}])
    for words, name, trained in (
        ("trl sft --model_name_or_path m --dataset_name rows.jsonl", "question_answer", "all"),
        ("trl sft --model_name_or_path m --dataset_name asked.jsonl", "prompt_completion",
            "assistant"),
        ("swift sft --model m --dataset rows.jsonl#1", "question_answer", "assistant"),
    ):  # fmt: skip
        recipe, _, _ = importers.import_recipe(words)
        assert (recipe.data[0].format, recipe.train_on) == (name, trained)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trl ppo --model_name_or_path m", "ppo: sft, dpo, kto, orpo, cpo, reward, grpo, rloo are"),
        ("swift rlhf --rlhf_type ppo --model m", "ppo: sft (also of seq_cls), pt and rlhf_type of"),
        ("swift rlhf --rlhf_type gkd --model m", "teacher_model: none; a teacher runs here"),
        ("swift sft --model m --tuner_type llamapro", "tuner_type: llamapro: expected lora or"),
        ("swift export --model m", "no training command: expected one such as trl sft"),
        ("echo hello", "no training command: expected one such as trl sft"),
    ],
)
def test_commands_without_a_recipe_are_refused(words, told):
    (problem,) = problems_of(importers.import_recipe, words)
    assert problem.startswith(f"{words}: {told}")


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("trl sft --model_name_or_path m --loss_type eaft", {"loss_type"}),
        ("trl dpo --model_name_or_path m --loss_type aot", {"loss_type"}),
        ("trl grpo --model_name_or_path m --reward_funcs get_soft_overlong_punishment",
            {"reward_funcs"}),
        ("swift sft --model m --dataset a/b --system prompt.txt", {"system"}),
        ("swift sft --model m --dataset swift/self-cognition --model_author ich me",
            {"model_author"}),
        ("swift rlhf --rlhf_type gkd --model m --teacher_model t --lmbda 0.5", {"lmbda"}),
    ],
)  # fmt: skip
def test_what_changes_the_loss_is_lost(words: str, lost: Lost):
    _, job, _ = importers.import_recipe(words)
    assert set(job.lost) == lost


def test_values_that_a_script_computes_are_read(tmp_path):
    script = "n=4\nswift sft --model m --gradient_accumulation_steps $((8/$n)) \\\n --max_length=64"
    (tmp_path / "s.sh").write_text(script)
    recipe, job, _ = importers.import_recipe(tmp_path / "s.sh", 3)
    assert (recipe.batch.rows, recipe.batch.max_length) == (6, 64)
    assert json.loads(json.dumps(job.source["max_length"])) == 64


COMMANDS: dict[str, dict[str, Any]] = {
    "trl dpo --model_name_or_path m --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1 "
    "--ld_alpha 0.5": {
        "loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0),
        "ld_alpha": 0.5},
    "python trl/mpo_vlm.py --model_name_or_path m --loss_type sigmoid sft": {
        "method": "dpo", "model.reads": ("image",),
        "model.trains": ("language", "connector", "tower")},
    "swift sft --model m --dataset a/b --freeze_vit false --vit_lr 1e-6 --freeze_aligner true "
    "--aligner_lr 1e-5 --loss_scale ignore_empty_think --init_weights pissa_niter_16": {
        "model.reads": ("image",), "model.trains": ("language", "tower"),
        "optim.groups": (Group("visual|vision", 1e-6),), "train_on": "assistant",
        "adapter.init_lora_weights": "pissa_niter_16"},
    "trl sft --model_name_or_path m --loss_type dft --neftune_noise_alpha 5": {
        "token_weight": "dft", "model.neftune_alpha": 5},
    "trl grpo --model_name_or_path m --reward_funcs think_format_reward own.rewards.mine "
    "--reward_weights 1 2 --gradient_accumulation_steps 4 --max_completion_length 64": {
        "batch.rows": 32, "steps_per_generation": 1, "epsilon": 0.2, "epsilon_high": 0.2,
        "reward_funcs.1": Reward("own.rewards:mine", 2.0), "batch.max_length": 64 + 1024},
    "trl rloo --model_name_or_path m --reward_funcs own.mine --steps_per_generation 16": {
        "beta": 0.05, "num_generations": 2, "steps_per_generation": 16},
    "swift rlhf --rlhf_type grpo --model m --dataset a/b --reward_funcs format --dynamic_sample "
    "true --overlong_filter true --importance_sampling_level sequence --system 'Be brief.'": {
        "loss_type": "gspo", "max_resample_times": 3, "mask_truncated_completions": True,
        "beta": 0.04, "data.0.system": "Be brief."},
    "swift sft --model m --dataset swift/self-cognition#500 --model_name bot --model_author me": {
        "data.0.replace": {"{{NAME}}": "bot", "{{AUTHOR}}": "me"}, "data.0.first": 500},
    "swift sft --model m --dataset a/b --task_type seq_cls --num_labels 2 --use_chat_template "
    "false": {"method": "classifier", "labels": ("0", "1")},
    "swift rlhf --rlhf_type gkd --model m --teacher_model t --lmbda 0 --beta 0.5": {
        "loss_type": "jsd", "teacher.name": "t", "temperature": 0.9},
}  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS)
def test_what_public_commands_use_is_translated(words):
    recipe, job, _ = importers.import_recipe(words)
    assert not job.lost
    for path, value in COMMANDS[words].items():
        found: Any = recipe
        for part in path.split("."):
            found = found[int(part)] if part.isdecimal() else getattr(found, part)
        assert found == value, path


def test_distillation_of_torchtune_is_translated(tmp_path):
    """(1 - r) x cross-entropy + r x divergence, divided by r."""
    own = {"_component_": "torchtune.training.FullModelHFCheckpointer"}
    more = {"kd_ratio": 0.25, "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLLoss"},
        "teacher_model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
        "teacher_checkpointer": own | {"checkpoint_dir": "models/teacher"}}  # fmt: skip
    (tmp_path / "kd.yaml").write_text(yaml.safe_dump(TUNE | more))
    recipe, job, _ = importers.import_recipe(tmp_path / "kd.yaml")
    assert not job.lost
    assert isinstance(recipe, Distill)
    assert recipe.teacher is not None
    assert (recipe.teacher.name, recipe.ce_weight) == ("models/teacher", 3.0)
    assert (recipe.loss_type, recipe.train_on) == ("forward_kl", "all")


ODD = (None, True, -1, 0, 2.5, "x", [], [1], ["a", "b"], {"a": 1}, 10**20)


def paths(values: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*at, key)
        yield from paths(value, (*at, key)) if isinstance(value, dict) else ()


@pytest.mark.slow
@pytest.mark.parametrize("words", [*COMMANDS, TRL, SWIFT, ""])
def test_any_value_is_imported_or_refused_with_a_sentence(words, monkeypatch):
    given = command_line.options_of(words, "") if words else TUNE
    refused, accepted = list[str](), 0
    for path in paths(given):
        for value in ODD:
            changed = copy.deepcopy(given)
            place = functools.reduce(operator.getitem, path[:-1], changed)
            place[path[-1]] = value
            monkeypatch.setattr(importers, "_read", lambda _, changed=changed: changed)
            try:
                importers.import_recipe("a command")
            except FinetuneError as error:
                refused += error.problems
            else:
                accepted += 1
    assert {each[:11] for each in refused} == {"a command: "}
    assert accepted
