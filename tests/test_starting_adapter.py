"""An adapter is trained further from exactly what it is, or refused with the way that works."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny, Train, change_json, losses, problems_of, slow_but
from conversations import ADDED, CLOSE, conversation_loss, plain, thinking
from peft import LoraConfig, PeftModel, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora.config import CordaConfig, EvaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from safetensors.torch import load_file, save_file
from tiny_run import trained_adapter
from transformers import AutoTokenizer

import finetune as ft
from finetune import catalog
from finetune.checkpoints.resume import claim
from finetune.checks import request
from finetune.inference.load import load_weights
from finetune.models.starting_adapter import complete_adapter
from finetune.planner import plan
from finetune.training.run_options import Options

WHOLE = {"batch": {"rows": 48, "micro_rows": 8}, "optim": {"lr": 1e-2, "warmup": 0}}
SHORT: dict[str, Any] = {"saving": {}, "evaluation": {}, "max_steps": 2, **WHOLE}


def recipe_of(tiny: Tiny, **sections: Any) -> ft.Recipe:
    return catalog.from_fields(tiny.fields(**SHORT | sections))


@pytest.fixture
def train(train: Train) -> Train:
    return functools.partial(train, **SHORT)


def refused(recipe: ft.Recipe) -> tuple[str, ...]:
    """Why a recipe is refused before training."""
    return problems_of(request.check_here, recipe)


def foreign(tiny: Tiny, folder: Path, **fields: Any) -> Path:
    """An adapter as plain PEFT writes it, away from its initial values."""
    fields = {"target_modules": ["q_proj", "up_proj"], **fields}
    trained_adapter(plain(tiny.model), **fields).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(tiny: Tiny, tmp_path: Path) -> Path:
    return foreign(tiny, tmp_path / "adapter")


def expected(tiny: Tiny, adapter: Path) -> float:
    """The loss of base and adapter in plain PEFT, over all rows."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    model = PeftModel.from_pretrained(plain(tiny.model), str(adapter)).eval()
    return conversation_loss(model, tokenizer, [{"source": str(tiny.data)}])


SETTINGS: dict[str, dict[str, Any]] = {
    "eva": {"eva_config": EvaConfig(rho=1.0)},
    "corda": {"corda_config": CordaConfig(corda_method="kpm")},
    "lora_ga": {"lora_ga_config": LoraGAConfig()},
}
"""Arguments of PEFT for initial values that are computed from rows."""
VARIANTS: dict[str, dict[str, Any]] = {
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "one layer": {"layers_to_transform": [1], "target_modules": ["v_proj"]},
    "head whole": {"modules_to_save": ["lm_head"]},
    "rows": {"trainable_token_indices": [3, 5]},
}


@pytest.mark.parametrize("variant", slow_but(("patterns", "dora", "rows"), VARIANTS))
def test_the_first_loss_is_that_of_base_and_adapter_in_plain_peft(tiny, tmp_path, train, variant):
    adapter = foreign(tiny, tmp_path / "adapter", **VARIANTS[variant])
    run = train("run", model={"adapter": str(adapter)})
    assert abs(losses(run)[0] - expected(tiny, adapter)) < CLOSE
    result = ft.export(run, tmp_path / "result")
    before, after = (load_file(f / "adapter_model.safetensors") for f in (adapter, result))
    assert {key: value.shape for key, value in before.items()} == {
        key: value.shape for key, value in after.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    further = PeftModel.from_pretrained(plain(tiny.model), str(result)).eval()
    held_out = conversation_loss(further, tokenizer, [{"source": str(tiny.eval_data)}])
    assert abs(losses(run, "eval")[-1] - held_out) < CLOSE


@pytest.mark.parametrize("init", slow_but(("eva",), SETTINGS))
def test_an_adapter_that_peft_initialized_from_rows_goes_on(tiny, tmp_path, train, init):
    """The way that the refusal of `adapter.init_lora_weights` names."""
    base, tokenizer = plain(tiny.model), AutoTokenizer.from_pretrained(tiny.model)
    rows = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        for ids in torch.arange(8 * 32).view(8, 1, 32)
    ]
    given = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "up_proj"]}
    config = LoraConfig(init_lora_weights=init, **given, **SETTINGS[init])

    def see_rows() -> None:
        for row in rows:
            loss = base(**row).loss
            if init == "lora_ga":
                loss.backward()

    if init == "corda":
        preprocess_corda(base, config, see_rows)
    elif init == "lora_ga":
        preprocess_loraga(base, config, see_rows)
    model = get_peft_model(base, config)
    if init == "eva":
        initialize_lora_eva_weights(model, rows, show_progress_bar=False)
    wanted = conversation_loss(model.eval(), tokenizer, [{"source": str(tiny.data)}])
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "adapter")
    named = {"adapter": str(tmp_path / "adapter")}
    if init != "eva":
        model.unload().save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        named["name"] = str(tmp_path / "base")
    run = train("run", model=named)
    assert abs(losses(run)[0] - wanted) < CLOSE


def test_a_run_its_result_and_an_export_are_the_same_adapter(tiny, tmp_path, train):
    first = train("first", adapter={"r": 4})
    folder = ft.export(first, tmp_path / "export")
    ways = [first.root, first.final, first.checkpoint(2), folder]
    runs = [
        train(f"further{number}", model={"adapter": str(way)}, adapter={"r": 4}, max_steps=1)
        for number, way in enumerate(ways)
    ]
    assert len({tuple(losses(run)) for run in runs}) == 1
    assert abs(losses(runs[0])[0] - expected(tiny, first.final)) < CLOSE
    recorded = json.loads(runs[0].starting_adapter.read_text())
    assert (recorded["folder"], recorded["base_model"]) == (str(first.final), str(tiny.model))
    assert len(recorded["sha256"]) == 64
    section = catalog.load(runs[0].recipe).adapter
    assert (section.r, section.alpha, len(section.targets)) == (4, 8.0, 14)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    way = {"model": {"adapter": str(first.root)}}
    for given in ({"targets": names}, {"r": 4}):
        assert request.check_here(recipe_of(tiny, **way, adapter=given)).recipe.adapter == section
    with pytest.raises(ft.FinetuneError, match=r"adapter\.targets: "):
        request.check_here(recipe_of(tiny, **way, adapter={"targets": names[:-1]}))
    assert (
        f"| Trained further from | `{first.root.name}` |"
        in (runs[0].final / "README.md").read_text()
    )


def test_pissa_of_a_run_goes_on_as_the_plain_lora_that_it_became(tiny, train):
    first = train("first", adapter={"r": 4, "init_lora_weights": "pissa"})
    further = train("further", model={"adapter": str(first.root)})
    assert abs(losses(further)[0] - expected(tiny, first.final)) < 1e-4
    assert catalog.load(further.recipe).adapter.r == 8  # type: ignore[union-attr]
    recipe = recipe_of(tiny, model={"adapter": str(first.checkpoint(2) / "adapter")})
    with pytest.raises(ft.FinetuneError, match=r"'pissa' changed the base weights.*final/"):
        request.check_here(recipe)


def test_added_tokens_go_on_with_the_rows_that_they_had(tiny, tmp_path, train):
    data = thinking(tiny, tmp_path)
    rows = {"r": 4, "trainable_token_indices": ADDED}
    first = train("first", **data, adapter=rows, model={"add_tokens": ADDED})
    named = {"add_tokens": ADDED, "adapter": str(first.root)}
    further = train("further", **data, adapter=rows, model=named)
    merged = plain(ft.export(first, tmp_path / "merged", merge=True))
    tokenizer = AutoTokenizer.from_pretrained(first.final)
    assert abs(losses(further)[0] - conversation_loss(merged, tokenizer, data["data"])) < CLOSE
    told = r"model.add_tokens: .* has no rows for <new>; merge"
    with pytest.raises(ft.FinetuneError, match=told):
        train("more", **data, model=named | {"add_tokens": ["<new>"]})


def test_an_adapter_goes_on_over_a_base_in_nf4(tiny, adapter, train):
    quantised = {"quantization": "nf4"}
    run = train("run", model={"adapter": str(adapter), **quantised})
    new = train("new", model=quantised, adapter={"r": 4})
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    base = load_weights(tiny.model, torch.float32, quantization="nf4")
    with_adapter = PeftModel.from_pretrained(base, str(adapter)).eval()
    wanted = conversation_loss(with_adapter, tokenizer, [{"source": str(tiny.data)}])
    assert abs(losses(run)[0] - wanted) < CLOSE
    assert abs(losses(new)[0] - wanted) > 10 * CLOSE


def test_a_resumed_run_goes_on_and_refuses_another_adapter(tiny, adapter, train):
    sections = {"model": {"adapter": str(adapter)}, "saving": {"every": 2}}
    sections["optim"] = {"schedule": "constant", "warmup": 0}
    straight = train("straight", **sections, max_steps=4)
    train("cut", **sections)
    assert losses(train("cut", resume=True, **sections, max_steps=4)) == losses(straight)
    foreign(tiny, adapter, lora_alpha=8)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({k: v + 1 for k, v in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(ft.FinetuneError, match=r"is not the adapter that .* started from"):
        train("cut", resume=True, **sections, max_steps=6)


def test_what_contradicts_the_adapter_is_refused_by_name(tiny, adapter):
    mine = {"r": 8, "alpha": 8, "targets": ["q_proj"], "use_dora": True, "dropout": 0.1}
    told = refused(recipe_of(tiny, model={"adapter": str(adapter)}, adapter=mine))
    way = f"leave the field out, or set adapter=null to take all of them from {adapter}"
    has = "but the adapter of model.adapter has"
    assert told == (
        f"adapter.r: 8, {has} 4; {way}",
        f'adapter.targets: ["q_proj"], {has} ["q_proj", "up_proj"]; {way}',
        f"adapter.use_dora: true, {has} false; {way}",
    )
    for section in (None, {}, {"alpha": 8, "targets": ["up_proj", "q_proj"], "dropout": 0.1}):
        recipe = recipe_of(tiny, model={"adapter": str(adapter)}, adapter=section)
        settled = request.check_here(recipe).recipe.adapter
        dropout = 0.1 if section else 0.0
        assert settled == ft.LoRA(r=4, alpha=8, targets=("q_proj", "up_proj"), dropout=dropout)


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[ft.Run, ft.Run]:
    """Runs of one step that trained all weights, and an adapter."""
    folder = tmp_path_factory.mktemp("made")

    def run(name: str, **sections: Any) -> ft.Run:
        recipe = recipe_of(tiny, max_steps=1, **sections)
        return ft.train(recipe, precision="fp32", options=Options(folder / name, plot=False))

    return run("full"), run("lora", adapter={"r": 4})


def unfinished_run(run: ft.Run, folder: Path) -> Path:
    (folder / "unfinished").mkdir()
    return Path(shutil.copy(run.recipe, folder / "unfinished")).parent


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS', expected 'CAUSAL_LM'"),
        ({"bias": "all"}, "bias is 'all', which no recipe can train"),
        ({"init_lora_weights": "loftq"}, "its initialisation 'loftq' changed the base weights"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tiny, adapter, fields, problem):
    change_json(adapter / "adapter_config.json", **fields)
    (told,) = refused(recipe_of(tiny, model={"adapter": str(adapter)}))
    assert told.startswith(f"model.adapter: {adapter}: {problem}")


def test_tensors_that_do_not_fit_the_base_are_named(tiny, adapter, train):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    q, up = (
        f"base_model.model.model.layers.0.{name}.lora_A.weight"
        for name in ("self_attn.q_proj", "mlp.up_proj")
    )
    tensors[q] = tensors[q][:2].clone()
    tensors["base_model.model.model.other.lora_A.weight"] = tensors.pop(up)
    save_file(tensors, path)
    assert problems_of(train, model={"adapter": str(adapter)}) == (
        f"model.adapter: {adapter} does not fit {tiny.model}: {up} is missing; "
        f"{q} is [2, 64], and the base needs [4, 64]; "
        "base_model.model.model.other.lora_A.weight belongs to no module of the base",
    )


def test_a_base_table_stored_with_an_adapter_is_refused_unless_equal(tiny, adapter, train):
    path, table = adapter / "adapter_model.safetensors", plain(tiny.model).lm_head.weight.detach()
    key = "base_model.model.lm_head.weight"
    save_file(load_file(path) | {key: table.clone()}, path)
    run = train("same", model={"adapter": str(adapter)})
    assert abs(losses(run)[0] - expected(tiny, adapter)) < CLOSE
    save_file(load_file(path) | {key: table + 1}, path)
    with pytest.raises(ft.FinetuneError, match=f"{key} replaces a table of the base"):
        train("other", model={"adapter": str(adapter)})


def test_a_run_is_the_model_that_it_made(tiny, tmp_path, made):
    """All weights: its result. An adapter: trained further, or refused with what to do."""
    full, lora = made
    named = request.check_here(recipe_of(tiny, model={"name": str(full.root)})).recipe.model
    assert (named.name, named.adapter) == (str(full.final), None)
    again = recipe_of(tiny, model={"name": str(lora.root)}, adapter={})
    further = request.check_here(again).recipe
    assert (further.model.name, further.model.adapter) == (str(tiny.model), str(lora.root))
    assert further.adapter.r == 4
    unfinished = unfinished_run(full, tmp_path)
    told = {
        f"model.name={lora.root}": f"finetune export {lora.root} --merge --to FOLDER",
        f"model.name={unfinished}": "is a run without a result; finish it",
    }
    for pair, words in told.items():
        (problem,) = refused(catalog.override(recipe_of(tiny), [pair]))
        assert words in problem, pair


def test_a_run_may_be_the_teacher_or_the_reference(tiny, tmp_path, made):
    """By its model; an adapter must be merged first, and an unfinished run is refused."""
    full, lora = made
    unfinished = unfinished_run(full, tmp_path)

    def resolved(method: str, run: Path) -> Any:
        named = {"teacher": {"name": str(run)}} if method == "distill" else {"reference": str(run)}
        return complete_adapter(recipe_of(tiny, method=method, **named))

    assert resolved("distill", full.root).teacher.name == str(full.final)
    assert resolved("dpo", full.root).reference == str(full.final)
    assert resolved("dpo", full.final).reference == str(full.final)
    for method, field in (("distill", "teacher.name"), ("dpo", "reference"), ("kto", "reference")):
        assert problems_of(resolved, method, lora.root) == (
            f"{field}: {lora.root} is a run with an adapter, expected a complete model; merge it "
            f"first: finetune export {lora.root} --merge --to FOLDER",
        )
        with pytest.raises(ft.FinetuneError, match=f"^{field}: {unfinished} is a run without a"):
            resolved(method, unfinished)


@pytest.mark.parametrize("method", ["reward", "classifier"])
def test_a_run_with_a_score_head_is_no_language_model(tiny, tmp_path, method):
    run = tmp_path / "scores"
    run.mkdir()
    (run / "recipe.json").write_text(json.dumps({"method": method, "model": {"name": "my/base"}}))
    why = (
        f"{run} is a run of method '{method}', whose result has a score head and no language-model "
        "head; name a run of another method, or the model that it was trained from: my/base"
    )
    for fields, field in (
        ({"method": "dpo", "model": {"name": str(run)}}, "model.name"),
        ({"method": "dpo", "reference": str(run)}, "reference"),
        ({"method": "distill", "teacher": {"name": str(run)}}, "teacher.name"),
    ):
        assert problems_of(complete_adapter, recipe_of(tiny, **fields)) == (f"{field}: {why}",)


def test_a_missing_adapter_folder_is_reported_with_what_to_name(tiny, adapter, tmp_path, made):
    full, lora = made
    (tmp_path / "empty").mkdir()
    with_config = shutil.copytree(adapter, tmp_path / "with_config")
    shutil.copy(tiny.model / "config.json", with_config)
    told = {
        f"model.adapter={full.root}": "has a complete model, not an adapter; train it further with "
        f"model.name={full.final}",
        f"model.adapter={tmp_path / 'empty'}": "has no adapter: it has no adapter_config.json",
        "model.adapter=./nowhere": "no such folder: ./nowhere; give a run",
        f"model.adapter={tiny.data}": f"no such folder: {tiny.data}; give a run",
        f"model.name={adapter}": f"to train it further, set model.name={tiny.model} "
        f"model.adapter={adapter}",
        f"model.name={with_config}": f"model.adapter={with_config}",
    }
    for pair, words in told.items():
        assert words in refused(catalog.override(recipe_of(tiny), [pair]))[0], pair
    words = "to train an adapter further, set model.adapter=FOLDER"
    for pair in ("adapter.start=x", "adapter.path=x", "model.lora_path=x", "peft_path=x",
                 "adapter_name_or_path=x", "resume_from_adapter=x", str(adapter)):  # fmt: skip
        assert words in problems_of(catalog.override, recipe_of(tiny), [pair])[0], pair
    other = recipe_of(tiny, adapter={"r": 4}, data=[{"source": "x.jsonl", "format": "messages"}])
    with pytest.raises(ft.FinetuneError, match=f"set model.adapter={lora.root} and choose another"):
        claim(lora, plan(other, "single"), True)
