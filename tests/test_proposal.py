"""`finetune init --model --data` writes a recipe, which inspect, plan and launch read."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Finetune, Tiny, problems_of, written

import finetune as ft
from finetune import catalog
from finetune.cli import main as cli

Made = Callable[[str], dict[str, Any]]
KINDS: dict[str, tuple[Made, str, str, dict[str, Any]]] = {
    "talks": (lambda w: {"query": w, "response": w}, "sft", "question_answer", {}),
    "pairs": (lambda w: {"prompt": w, "chosen": w, "rejected": "b"}, "dpo", "preference", {}),
    "judged": (lambda w: {"prompt": w, "completion": w, "label": "c" in w}, "kto", "kto", {}),
    "classes": (
        lambda w: {"text": w, "label": "long" if len(w) > 8 else "short"},
        "classifier", "labelled", {"labels": ("long", "short")}),
    "scores": (
        lambda w: {"text": w, "label": len(w) / 2}, "classifier", "labelled",
        {"labels": (), "problem_type": "regression"}),
    "several": (
        lambda w: {"text": w, "label": sorted({*w.split()})}, "classifier", "labelled",
        {"labels": ("a", "c", "d"), "problem_type": "multi_label_classification"}),
    "texts": (lambda w: {"text": w}, "pretrain", "text", {}),
}  # fmt: skip
"""A row from some words, and the method, the format and the fields that follow from it."""


def rows(make: Made, count: int = 60) -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [make(" ".join(rng.choices("acd", k=2 + n % 7))) for n in range(count)]


@pytest.mark.parametrize("name", KINDS)
def test_method_format_and_labels_follow_from_the_rows(tiny, tmp_path, name):
    make, method, form, own = KINDS[name]
    data = written(tmp_path / "data.jsonl", rows(make))
    recipe = ft.recipe_for(str(tiny.model), str(data))
    assert (recipe.method, recipe.data[0].format) == (method, form)
    assert {field: getattr(recipe, field) for field in own} == own
    assert recipe.batch.max_length % 64 == 0
    assert (recipe.batch.rows, recipe.eval_rows) == (8, 0.05)


def test_the_file_is_the_recipe_and_its_next_commands_run(
    finetune: Finetune, tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("".join(tiny.data.open().readlines()[:16]))
    words = f"init mine.yaml --model {tiny.model} --data data.jsonl adapter.r=4".split()
    assert cli.main(words) == 0
    recipe = catalog.load(Path("mine.yaml"))
    assert recipe.adapter == ft.LoRA(r=4)
    assert "# data: format 'messages' by its columns" in Path("mine.yaml").read_text()
    inspect, plan, launch = (
        line.split() for line in capsys.readouterr().out.split("next:\n")[1].splitlines()
    )
    assert [inspect[:2], plan[:2]] == [["finetune", "inspect"], ["finetune", "plan"]]
    assert cli.main(inspect[1:]) == cli.main(plan[1:]) == 0
    assert launch[:2] == ["finetune", "launch"]
    finetune(*launch[1:], cwd=tmp_path).passed()
    (run,) = Path("runs").iterdir()
    assert (run / "final").is_dir()
    capsys.readouterr()
    assert cli.main(words) == 2
    told = "error: mine.yaml: already exists; choose another name, or remove it\n"
    assert capsys.readouterr().err == told


@pytest.fixture
def large(tiny: Tiny, tmp_path: Path) -> Callable[[int, int], Path]:
    """A folder with the config of a large Llama, without weights, and the small tokenizer."""

    def make(hidden: int, layers: int) -> Path:
        folder = shutil.copytree(tiny.model, tmp_path / "large")
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        sizes = {
            "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
            "num_attention_heads": hidden // 128, "num_key_value_heads": 8, "head_dim": 128,
        }  # fmt: skip
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | sizes))
        return folder

    return make


@pytest.mark.parametrize(
    ("gpu", "gpus", "quantization", "backend"),
    [
        ("H200", 1, "none", "single"),
        ("RTX4090", 1, "nf4", "single"),
        ("RTX4090", 8, "nf4", "ddp"),  # LoRA would be sharded over PCIe: slower
    ],
)
def test_weights_and_backend_are_the_fastest_that_fit_on_the_gpus(
    large, tiny, gpu, gpus, quantization, backend
):
    model = large(5120, 40)  # 17 billion parameters: 34 GB in bf16, 9 GB in 4 bits
    recipe = ft.recipe_for(str(model), str(tiny.data), gpu=gpu, gpus=gpus)
    assert (recipe.adapter, recipe.optim.lr) == (ft.LoRA(r=16), 2e-4)
    assert (recipe.model.quantization, recipe.backend) == (quantization, backend)
    assert recipe.batch.rows % (gpus * recipe.batch.micro_rows) == 0
    assert ft.plan(recipe, gpus=gpus, gpu=gpu).status == "safe"


def test_words_decide_what_is_not_chosen(large, tiny):
    given = ["adapter=null", "model.quantization=none", "optim.lr=3e-5", "batch.rows=16"]
    recipe = ft.recipe_for(str(large(1024, 8)), str(tiny.data), "sft", "H100-80", overrides=given)
    assert (recipe.adapter, recipe.optim.lr, recipe.batch.rows) == (None, 3e-5, 16)
    assert recipe.backend == "single"
    proposed = [
        ft.recipe_for(str(tiny.model), str(tiny.data), overrides=words).adapter
        for words in (["adapter.r=4"], [])
    ]
    assert proposed == [ft.LoRA(r=4), ft.LoRA(r=16)]  # of one process, each by its own words


def test_rare_long_rows_are_dropped_and_documents_are_split(tiny, tmp_path):
    talk = [{"question": "a", "answer": "c " * 4} for _ in range(300)]
    data = written(tmp_path / "talk.jsonl", [*talk, {"question": "a", "answer": "c " * 200}])
    recipe = ft.recipe_for(str(tiny.model), str(data))
    assert (recipe.batch.max_length, recipe.batch.overlong) == (64, "drop")
    data = written(tmp_path / "text.jsonl", [{"text": "c " * 900}] * 9)
    recipe = ft.recipe_for(str(tiny.model), str(data))
    assert (recipe.batch.max_length, recipe.batch.overlong) == (256, "split")  # the context


def test_a_tokenizer_without_a_template_gets_one_it_has_the_tokens_of(tiny, tmp_path):
    folder = shutil.copytree(tiny.model, tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    assert ft.recipe_for(str(folder), str(tiny.data)).model.chat_template == "chatml"
    assert ft.recipe_for(str(tiny.model), str(tiny.data)).model.chat_template is None


@pytest.mark.parametrize(
    ("row", "method", "told"),
    [
        ({"instruction": "a", "chosen": "c"}, None,
            "no format reads its columns ('instruction', 'chosen'); 'alpaca_preference' lacks "
            "'rejected'"),
        ({"foo": 1}, None, "no format reads its columns ('foo'); give another name to a column"),
        ({"prompt": "a"}, None, "a prompt and no answer: to learn from rewards, give --method"),
        ({"question": "a", "answer": "c"}, "dpo", "no format reads its columns"),
        ({"messages": [{"role": "captain", "content": "a"}]}, None, "captain"),
        ({"question": "a", "answer": "c"}, "dop", "did you mean 'dpo'?"),
    ],
)  # fmt: skip
def test_rows_that_no_format_reads_are_named_with_what_they_lack(tiny, tmp_path, row, method, told):
    data = written(tmp_path / "data.jsonl", [row])
    (problem,) = problems_of(ft.recipe_for, str(tiny.model), str(data), method)
    assert told in problem
    assert method == "dop" or problem.startswith(f"{data} row 1: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--model M", "give --model and --data"),
        ("--gpu H100-80", "give --model and --data"),
        ("--model M --data gone.jsonl", "data.source: no such file or folder: gone.jsonl"),
        ("--model M --data gone.jsonl --gpu H101", "--gpu H101: unknown"),
        ("--model M --data d --from quickstart", "--from copies a recipe"),
    ],
)
def test_what_init_cannot_use_is_refused(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine.yaml", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")
    assert list(tmp_path.iterdir()) == []


def test_nothing_fits_is_said_with_what_is_missing(large, tiny):
    model, data = str(large(16384, 160)), str(tiny.data)
    (problem,) = problems_of(ft.recipe_for, model, data)
    assert problem.startswith("nothing fits on this machine with ")
    assert ": the smallest is QLoRA with single, 334." in problem  # GB
    (problem,) = problems_of(ft.recipe_for, model, data, gpu="T4")
    assert problem.startswith("precision: fp16 needs loss scaling, which zero3_offload")
