"""A plan says what a recipe means on a backend, or why it cannot run and what to use instead."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from conftest import problems_of
from huggingface_hub import constants
from planning import ROWS, ask, refused
from transformers import AutoConfig, AutoModelForCausalLM

from finetune import backend, catalog
from finetune.backend import Backend
from finetune.errors import FinetuneError
from finetune.methods.sft import SFT
from finetune.planner import plan
from finetune.planner.families import FAMILIES
from finetune.planner.mesh import DATA
from finetune.recipe import LoRA, Model, Recipe

ALL = {name: backend.load(name) for name in backend.names()}
BACKENDS = {name: each for name, each in ALL.items() if not each.axes.any}
"""Those that keep a model's layers and rows in one process; `test_division` has the others."""
BASE = SFT(Model("models/small")).with_data(ROWS).with_batch(rows=16, micro_rows=1)
SHARDED = {name for name, each in BACKENDS.items() if each.shard != "none"}

TOO_SMALL = {
    "local_folder_lora": {8}, "quickstart": {8}, "quickstart_base": {8}, "quickstart_start": {8},
    "quickstart_dpo": {8}, "quickstart_grpo": {8}, "quickstart_images": {8},
}  # fmt: skip
"""Shipped recipes whose step has fewer rows than so many processes take at once."""


@pytest.mark.parametrize("name", catalog.names())
def test_a_shipped_recipe_is_planned_on_every_backend_or_refused_with_a_way_out(name):
    recipe = catalog.resolve(name)
    built_whole = recipe.model.quantization != "none" or recipe.model.config is not None
    for machine in BACKENDS.values():
        rounds = machine.device == "nvme" and built_whole
        for processes in (1,) if machine.engine == "single" else (2, 8):
            problems = refused(recipe, machine.name, processes)
            if rounds:
                assert problems.pop().endswith("zero3_nvme would round it; use zero3_offload")
            if processes in TOO_SMALL.get(name, ()):
                unit = recipe.batch.micro_rows * processes
                (problem,) = problems
                assert problem.endswith(f"= {unit}); use batch.rows={unit}")
                assert len(refused(recipe.with_batch(rows=unit), machine.name, processes)) == rounds
            elif not rounds:
                assert problems == []
                settled = plan(recipe, machine, processes)
                held = settled.accumulation * recipe.batch.micro_rows * processes
                assert held == recipe.batch.rows


def test_the_batch_of_a_step_is_the_same_on_any_number_of_processes():
    recipe = BASE.with_batch(rows=48, micro_rows=2)
    assert [plan(recipe, "ddp", n).accumulation for n in (2, 3, 4, 8)] == [12, 8, 6, 3]
    assert plan(recipe, "single").accumulation == 24


@pytest.mark.parametrize(("rule", "lr"), [("none", 1e-3), ("sqrt", 2e-3), ("linear", 4e-3)])
def test_the_learning_rate_is_scaled_only_on_request_and_reported(rule, lr):
    recipe = BASE.with_optim(lr=1e-3, lr_scaling=rule)
    settled = plan(recipe, "ddp", 4)
    assert (settled.lr, settled.summary()["lr"]) == (lr, lr)
    said = f"optim.lr_scaling={rule}: the learning rate is {lr:.3g} on 4 processes (0.001 on one)"
    assert settled.notes() == ([] if rule == "none" else [said])
    assert (said in settled.explain()) is (rule != "none")
    assert plan(recipe, "single").lr == 1e-3


def indented(recipe: Recipe, precision: backend.Precision = "bf16") -> list[str]:
    """What a plan says of options that are settled when the run knows its device and its data."""
    lines = plan(recipe, "single", precision=precision).explain().splitlines()
    return [line.strip() for line in lines if line.startswith(" ")]


def test_a_plan_names_the_rule_of_an_option_chosen_at_run_time():
    assert indented(BASE) == [
        "pointwise: compiled from 10,000 tokens of the run on a CPU; "
        "compiled from 3,000,000 tokens of the run on a GPU",
        "allocator: pooled from 10,000 tokens of the run on a CPU under Linux",
        f"attention: documents apart, {ON_CPU} in {ONE_PASS}; {ON_GPU} in {ONE_KERNEL}",
    ]
    settled = BASE.with_kernels(pointwise="eager", allocator="plain").with_batch(padding_free=False)
    assert indented(settled) == []
    # A plan for a GPU says nothing of CPUs.
    lines = plan(BASE, "single").explain("cuda").splitlines()
    assert [line.strip() for line in lines if line.startswith(" ")] == [
        "pointwise: compiled from 3,000,000 tokens of the run on a GPU",
        f"attention: documents apart, {ON_GPU} in {ONE_KERNEL}",
    ]
    assert not any("allocator" in line or "CPU" in line for line in lines)
    cpu = plan(BASE, "single").explain("cpu")
    assert "allocator: pooled from" in cpu
    assert "GPU" not in cpu


ON_CPU, ON_GPU = "on a CPU with AMX or AVX-512 for bf16", "on a GPU from Ampere on"
ONE_PASS, ONE_KERNEL = "one pass where pointwise is compiled", "one variable-length kernel"


@pytest.mark.parametrize(
    ("kind", "fields", "precision", "cpu", "gpu"),
    [
        ("llama", {}, "bf16", "", ""),
        ("gemma2", {}, "bf16", "", "it does not cap scores"),  # where its config says nothing
        ("gemma2", {"attn_logit_softcapping": None}, "bf16", "", ""),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "bf16", "", "it does not cap scores"),
        ("llama", {"attention_dropout": 0.1}, "bf16", *["it does not drop weights"] * 2),
        ("llama", {}, "fp32", *["fp32 has none"] * 2),
    ],
)
def test_a_plan_reports_the_attention_of_concatenated_documents(kind, fields, precision, cpu, gpu):
    model = Model(config={"model_type": kind} | fields, tokenizer="models/small")
    recipe = BASE.with_model(model)
    told = [
        f"{where} each by itself, not in {call}: {reason}" if reason else f"{where} in {call}"
        for where, call, reason in ((ON_CPU, ONE_PASS, cpu), (ON_GPU, ONE_KERNEL, gpu))
    ]
    told = f"attention: documents apart, {'; '.join(told)}"
    assert indented(recipe, precision)[-1] == told
    assert indented(recipe.with_batch(packing=True), precision)[-1] == told
    if kind != "gemma2":  # which transformers builds with no sdpa
        padded = recipe.with_batch(padding_free=False)
        assert not any("attention" in line for line in indented(padded, precision))
    others = recipe.with_model(dataclasses.replace(model, attention="eager"))
    assert not any("attention" in line for line in indented(others))


PADDED = "padded to the longest row of a micro-batch: "


@pytest.mark.parametrize(
    ("kind", "attention", "batch", "told"),
    [
        ("llama", "sdpa", {}, "side by side without padding, each attending to itself alone"),
        ("llama", "sdpa", {"padding_free": False}, f"{PADDED}batch.padding_free=false"),
        ("llama", "eager", {}, f"{PADDED}model.attention=eager computes scores of all token pairs "
         "of a micro-batch"),
        ("falcon", "sdpa", {}, f"{PADDED}concatenated documents have not been shown to be exact "
         "for 'falcon' models"),
    ],
)  # fmt: skip
def test_a_plan_reports_the_layout_of_rows_and_its_reason(kind, attention, batch, told):
    model = Model(config={"model_type": kind}, tokenizer="models/small", attention=attention)
    settled = plan(BASE.with_model(model).with_batch(**batch), "single")
    assert settled.summary()["padding"] == told
    assert f"rows         {told}" in settled.explain().splitlines()


def test_rows_that_must_be_side_by_side_are_refused_where_that_is_not_exact():
    bloom = Model(config={"model_type": "bloom"}, tokenizer="models/small", attention="eager")
    scores, unknown = refused(BASE.with_model(bloom).with_batch(padding_free=True), "single")
    assert scores.startswith("batch.padding_free: model.attention=eager computes scores")
    assert "'bloom' models" in unknown
    assert unknown.endswith("; use batch.padding_free=auto, which then pads")
    assert refused(BASE.with_batch(packing=True, padding_free=False), "single") == [
        "batch.padding_free: false, but batch.packing=true concatenates documents; remove one of "
        "the two"
    ]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "rows", "steps"),
    [(1, None, 160, 10), (1, None, 161, 11), (2.5, None, 160, 25), (1, None, 3, 1), (9, 7, 160, 7)],
)
def test_steps_are_counted_over_the_whole_job(epochs, max_steps, rows, steps):
    recipe = BASE.with_epochs(epochs)
    recipe = recipe if max_steps is None else recipe.with_steps(max_steps)
    for name, processes in (("single", 1), ("zero2", 8)):
        assert plan(recipe, name, processes).steps(rows) == steps


def test_precision_and_processes_come_from_the_backend_unless_they_are_given():
    assert plan(BASE, "ddp").backend.precision == "bf16"
    assert plan(BASE, "ddp", precision="fp32").backend.precision == "fp32"
    assert (plan(BASE, "ddp").processes, plan(BASE, "ddp", 4).processes) == (2, 4)
    assert plan(BASE.with_backend("zero3"), None).backend.name == "zero3"


@pytest.mark.parametrize(
    ("rows", "micro", "processes", "way_out"),
    [(10, 4, 2, "8 or 16"), (7, 4, 2, "8"), (100, 8, 8, "64 or 128")],
)
def test_a_batch_that_does_not_divide_is_refused_with_its_numbers(rows, micro, processes, way_out):
    unit = micro * processes
    assert refused(BASE.with_batch(rows=rows, micro_rows=micro), "ddp", processes) == [
        f"batch.rows: {rows} does not divide into micro-batches of {micro} rows on {processes} "
        f"processes ({micro} x {processes} = {unit}); use batch.rows={way_out}"
    ]
    for choice in way_out.split(" or "):
        assert refused(BASE.with_batch(rows=int(choice), micro_rows=micro), "ddp", processes) == []


def test_a_recipe_needs_a_model_a_tokenizer_data_and_one_thing_to_evaluate_on():
    assert refused(SFT(), "single") == [
        "model: give model.name (a hub id or a folder) or model.config (from scratch)",
        "data: none; add a source with its format",
    ]
    assert refused(BASE.with_model(Model(config={"model_type": "llama"})), "single") == [
        "model.tokenizer: a model built from scratch needs one (a hub id or a folder)"
    ]
    nothing = "evaluation: there is nothing to evaluate on; give eval_data or eval_rows"
    assert refused(BASE.with_evaluation(every=5), "single") == [nothing]
    assert refused(BASE.with_evaluation(patience=5), "single") == [nothing]
    held_out = SFT(Model("models/small"), eval_rows=4).with_data(ROWS)
    assert refused(held_out.with_evaluation(every=5), "single") == []
    assert refused(held_out.with_data(ROWS, eval_data=ROWS), "single") == [
        "eval_rows: rows are held out of `data` only if eval_data is not given; remove one"
    ]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_weights_need_an_adapter_and_a_pretrained_base(kind):
    bare = BASE.with_model(Model("models/small", quantization=kind))
    assert refused(bare, "single") == [
        f"model.quantization: {kind} weights cannot be trained; add an adapter (with_qlora) or "
        "use model.quantization=none"
    ]
    assert refused(bare.with_lora(), "single") == []
    built = Model(config={"model_type": "llama"}, tokenizer="t", quantization=kind)
    assert refused(BASE.with_lora().with_model(built), "single") == [
        f"model.quantization: {kind} needs pretrained weights (model.name)"
    ]


INT8 = Model("models/small", quantization="int8")


@pytest.mark.parametrize(
    ("recipe", "engines", "told"),
    [
        (BASE.with_model(INT8).with_lora(), ("fsdp", "hsdp", "zero3"),
         "model.quantization: int8 weights cannot be sharded by zero3; use nf4, or a backend that "
         "keeps parameters unsharded (ddp, zero2)"),
        (BASE.with_lora(trainable_token_indices=(7,)), ("zero3",), "use fsdp_full_shard or zero2"),
    ],
    ids=["int8", "rows"],
)  # fmt: skip
def test_what_shards_cannot_hold_is_refused_where_parameters_are_sharded(recipe, engines, told):
    cannot = {name for name in BACKENDS if refused(recipe, name)}
    assert cannot == {name for name in BACKENDS if name.startswith(engines)}
    (reason,) = refused(recipe, "zero3")
    assert reason.endswith(told)


@pytest.mark.parametrize("init", ["loftq", "eva", "corda", "lora_ga"])
def test_an_initialisation_that_needs_more_than_a_recipe_holds_is_begun_with_peft(init):
    (problem,) = refused(BASE.with_lora(init_lora_weights=init), "single")
    assert problem.startswith(f"adapter.init_lora_weights: '{init}' ")
    assert "and name its folder in model.adapter" in problem
    assert ("in model.name" in problem) == (init != "eva")


def test_an_unknown_initialisation_is_refused():
    assert refused(BASE.with_lora(init_lora_weights="pissa_niter_x"), "single") == [
        "adapter.init_lora_weights: 'pissa_niter_x' is unknown; use true, gaussian, pissa, "
        "pissa_niter_16, olora or orthogonal"
    ]


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "orthogonal"])
def test_an_initialisation_that_reads_the_base_needs_it_unquantised(init):
    assert refused(BASE.with_lora(init_lora_weights=init), "single") == []
    assert refused(BASE.with_qlora(init_lora_weights=init), "single") == [
        f"adapter.init_lora_weights: '{init}' reads base weights; use quantization=none"
    ]
    assert refused(BASE.with_qlora(init_lora_weights="gaussian"), "single") == []


@pytest.mark.parametrize("kind", [kind for kind, f in FAMILIES.items() if f.shape])
def test_sdpa_is_refused_where_transformers_builds_none(kind):
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, num_hidden_layers=1, pad_token_id=0)
        try:
            AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
            reasons = []
        except ValueError:
            reasons = [
                f"model.attention: transformers has no sdpa for {kind}; use model.attention=eager, "
                "or batch.padding_free=auto"
            ]
    scratch = Model(config={"model_type": kind}, tokenizer="models/small")
    recipe = dataclasses.replace(BASE, model=scratch).with_batch(padding_free=False)
    assert refused(recipe, "single") == reasons
    assert refused(recipe.with_batch(padding_free="auto"), "single") == []
    assert refused(recipe.with_batch(padding_free="auto", packing=True), "single") == []
    eager = dataclasses.replace(recipe, model=dataclasses.replace(scratch, attention="eager"))
    assert refused(eager, "single") == []


def test_a_hub_id_of_the_table_is_known_to_have_no_sdpa():
    recipe = dataclasses.replace(BASE, model=Model("google/gemma-2-2b"))
    assert refused(recipe, "single") == []
    recipe = recipe.with_batch(padding_free=False)
    assert "no sdpa for gemma2" in refused(recipe, "single")[0]


def test_an_optimizer_that_needs_whole_tensors_is_refused_where_they_are_cut():
    name = "paged_adamw_8bit"
    reasons = {each: refused(BASE.with_optim(name=name), each) for each in BACKENDS}
    assert {each for each, found in reasons.items() if found} == SHARDED
    for each in SHARDED:
        (reason,) = reasons[each]
        assert reason.startswith(f"optim.name: {name} quantizes its moments in blocks")
        assert each in reason
        assert reason.endswith("use adamw, or ddp")


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_4bit", "adafactor"])
def test_update_rules_of_rows_are_refused_where_rows_are_cut(name):
    reasons = {each: refused(BASE.with_optim(name=name), each) for each in BACKENDS}
    flat = {each for each in BACKENDS if each.startswith("zero")}
    flat |= {"tp", "tp_pp", "tp_fsdp"} & set(BACKENDS) if name == "adafactor" else set()
    rows = set(BACKENDS) - flat
    assert {each for each, found in reasons.items() if not found} == rows
    assert all(
        found[0].startswith(f"optim.name: {name}") and found[0].endswith("or fsdp_full_shard")
        for found in reasons.values()
        if found
    )


@pytest.mark.parametrize(
    ("name", "processes", "reason"),
    [
        ("single", 2, "processes: single runs one process, got 2; use ddp or fsdp_full_shard"),
        ("ddp", 1, "processes: ddp needs at least 2, got 1; use single"),
        ("ddp", 0, "processes: got 0, expected at least 1"),
        ("zero2", -1, "processes: got -1, expected at least 1"),
    ],
)
def test_a_number_of_processes_that_cannot_be_is_refused(name, processes, reason):
    assert problems_of(plan, BASE, name, processes) == (reason,)


def test_every_reason_is_reported_at_once():
    adapter = LoRA(init_lora_weights="pissa")
    recipe = SFT(INT8, adapter=adapter).with_data(ROWS).with_batch(rows=9, micro_rows=2)
    recipe = recipe.with_optim(name="paged_adamw_8bit").with_evaluation(every=3)
    problems = refused(recipe, "fsdp_full_shard")
    assert [problem.split(":")[0] for problem in problems] == [
        "batch.rows", "model.quantization", "adapter.init_lora_weights", "optim.name", "evaluation",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_accelerate_itself_reads_a_backend(name):
    """With its own loader, which refuses unknown keys at the top; nested ones are ours to check."""
    config = load_config_from_file(str(ALL[name].path))
    assert isinstance(config, ClusterConfig)
    engine = {"NO": "single", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
    kind = str(getattr(config.distributed_type, "value", config.distributed_type))
    assert engine.get(kind, "mesh" if ALL[name].axes.any else "ddp") == ALL[name].engine
    assert (config.mixed_precision, config.num_processes) == ("bf16", ALL[name].processes)


REALISED = {
    "single": ("single", "none", "none", "none"),
    "ddp": ("ddp", "none", "none", "none"),
    "fsdp_full_shard": ("fsdp", "params", "none", "none"),
    "fsdp_shard_grad_op": ("fsdp", "grads", "none", "none"),
    "fsdp_full_shard_offload": ("fsdp", "params", "all", "cpu"),
    "fsdp_shard_grad_op_offload": ("fsdp", "grads", "all", "cpu"),
    "hsdp": ("fsdp", "params", "none", "none"),
    "hsdp_shard_grad_op": ("fsdp", "grads", "none", "none"),
    "zero1": ("deepspeed", "optimizer", "none", "none"),
    "zero2": ("deepspeed", "grads", "none", "none"),
    "zero2_offload": ("deepspeed", "grads", "optimizer", "cpu"),
    "zero3": ("deepspeed", "params", "none", "none"),
    "zero3_offload": ("deepspeed", "params", "all", "cpu"),
    "zero3_nvme": ("deepspeed", "params", "all", "nvme"),
}


def test_a_backend_matches_its_name():
    assert {n: (b.engine, b.shard, b.offload, b.device) for n, b in BACKENDS.items()} == REALISED


FSDP = yaml.safe_load(Path(str(BACKENDS["fsdp_full_shard"].path)).read_text())
ZERO = yaml.safe_load(Path(str(BACKENDS["zero2"].path)).read_text())
CHANGES: list[tuple[dict[str, Any], str, str]] = [
    (FSDP, "mixed_precison=bf16",
     "mixed_precison: unknown key; did you mean 'mixed_precision'?"),
    (FSDP, "fsdp_config.fsdp_reshard_after_foward=false",  # which Accelerate ignores
     "fsdp_config.fsdp_reshard_after_foward: unknown key; did you mean "
     "'fsdp_reshard_after_forward'?"),
    (ZERO,
     "deepspeed_config.gradient_accumulation_steps=4 deepspeed_config.gradient_clipping=1.0",
     "deepspeed_config.gradient_accumulation_steps: the recipe owns this (derived from "
     "batch.rows, batch.micro_rows and the processes); remove it\n"
     "deepspeed_config.gradient_clipping: the recipe owns this (optim.max_grad_norm); remove it"),
    (FSDP, "fsdp_config.fsdp_activation_checkpointing=true",
     "fsdp_config.fsdp_activation_checkpointing: the recipe owns this "
     "(model.activation_checkpointing); remove it"),
    (ZERO, "deepspeed_config.offload_optimizer_nvme_path=/nvme",
     "deepspeed_config.offload_optimizer_nvme_path: Accelerate drops it; pass --nvme-path to "
     "finetune; remove it"),
    (FSDP,
     "mixed_precision=fp8 fsdp_config.fsdp_version=1 fsdp_config.fsdp_auto_wrap_policy=NO_WRAP "
     "fsdp_config.fsdp_reshard_after_forward=FULL_SHARD",
     "mixed_precision: got 'fp8', expected 'bf16', 'fp16' or 'no' (quoted)\n"
     "fsdp_config.fsdp_version: expected 2 (FSDP1 mixes up data types)\n"
     "fsdp_config.fsdp_reshard_after_forward: expected true (FULL_SHARD) or false "
     "(SHARD_GRAD_OP)\n"
     "fsdp_config.fsdp_auto_wrap_policy: expected TRANSFORMER_BASED_WRAP"),
    (FSDP, "mixed_precision=no",  # which YAML reads as false
     "mixed_precision: got False, expected 'bf16', 'fp16' or 'no' (quoted)"),
    (ZERO, "num_processes=two",
     "num_processes: got 'two', expected a whole number of at least 1"),
    (ZERO, "deepspeed_config.zero_stage=4",
     "deepspeed_config.zero_stage: got 4, expected 1, 2 or 3"),
    (ZERO,
     "deepspeed_config.offload_param_device=cpu deepspeed_config.offload_optimizer_device=cpu",
     "deepspeed_config.offload_param_device: needs zero_stage: 3"),
    (ZERO, "deepspeed_config.offload_optimizer_device=nvme",
     "deepspeed_config.offload_optimizer_device: nvme needs zero_stage: 3"),
    (ZERO, "deepspeed_config.zero_stage=3 deepspeed_config.offload_param_device=cpu",
     "deepspeed_config.offload_param_device: expected offload_optimizer_device's value"),
    (ZERO, "deepspeed_config.offload_optimizer_device=disk",
     "deepspeed_config.offload_optimizer_device: got 'disk', expected none, cpu or nvme"),
    (FSDP, "distributed_type=TPU",
     "distributed_type: got 'TPU', expected one of NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED\n"
     "fsdp_config: valid only with distributed_type: FSDP"),
    (FSDP, "fsdp_config=full", "fsdp_config: expected keys and values, got 'full'"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changes", "told"), CHANGES, ids=[c for _, c, _ in CHANGES])
def test_a_backend_is_read_strictly(config, changes, told, tmp_path):
    changed = {key: dict(v) if isinstance(v, dict) else v for key, v in config.items()}
    for change in changes.split():
        key, _, value = change.partition("=")
        section, _, inner = key.rpartition(".")
        (changed[section] if section else changed)[inner] = yaml.safe_load(value)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(changed))
    expected = [f"{path}: {line}" for line in told.split("\n")]
    assert list(problems_of(backend.load, str(path))) == expected


@pytest.mark.parametrize("text", [b"a: [", b"- 1", b"", b"a: \xe9"])
def test_a_file_that_is_not_a_backend_is_refused(text, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text)
    with pytest.raises(FinetuneError, match=re.escape(f"{path}: ")):
        backend.load(str(path))


def test_a_backend_may_be_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(ZERO | {"num_processes": 8}))
    mine = backend.load(str(path))
    assert (mine.name, mine.processes, mine.path) == ("mine", 8, path)
    assert mine.same_as(BACKENDS["zero2"]) == []
    differ = ["engine: deepspeed != fsdp", "shard: grads != params"]
    differ += [f"zero_init: {mine.zero_init} != False"] * mine.zero_init
    assert mine.same_as(Backend("other", "fsdp", "params")) == differ


def test_a_model_that_is_nowhere_is_refused_without_a_network(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    recipe = catalog.resolve("llama3_1_8b_full", ["model.name=acme/unknown"])
    (said,) = problems_of(ask, "--gpu H100-80 --backend single", recipe)
    assert "the hub did not provide it (HF_HUB_OFFLINE is set); name a local folder" in said


def test_hybrid_sharding_has_a_mesh_of_copies_and_shards():
    found = plan(BASE, "hsdp", 8)
    assert (found.mesh.replicate, found.mesh.shard, found.accumulation) == (4, 2, 2)
    places = [found.mesh.place(rank) for rank in (0, 1, 5)]
    assert [{axis: place[axis] for axis in DATA} for place in places] == [
        {"replicate": 0, "shard": 0},
        {"replicate": 0, "shard": 1},
        {"replicate": 2, "shard": 1},
    ]
    assert sum(found.mesh.data_rank(rank) for rank in range(8)) == sum(range(8))
    (problem,) = refused(BASE, "hsdp", 5)
    assert problem.startswith("processes: 5 is not a multiple of the shard size 2; use a multiple")
    assert plan(BASE, "zero3", 4).mesh == plan(BASE, "fsdp_full_shard", 4).mesh
    assert plan(BASE, "ddp", 4).mesh.replicate == 4


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [
        ("hsdp", "dp_shard_size: 3",
         "dp_replicate 2 x dp_shard 3 = 6 processes, but num_processes is 4"),
        ("hsdp", "dp_shard_size: two", "got 'two', expected a whole number"),
        ("hsdp", "dp_shard_sise: 2", "unknown key; did you mean 'parallelism_config"),
        ("hsdp", "tp_size: 2", "expected MULTI_GPU (also on CPUs) with axes that divide"),
        ("zero3", "dp_shard_size: 2", "valid only with distributed_type: FSDP or axes"),
    ],
)  # fmt: skip
def test_an_invalid_mesh_is_refused(name, line, problem, tmp_path):
    text = backend.find(name).read_text().splitlines()
    text = text[:-1] if name == "hsdp" else [*text, "parallelism_config:"]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join([*text, f"  parallelism_config_{line}"]) + "\n")
    assert problem in "; ".join(problems_of(backend.load, str(path)))
