"""Bad input gets a clear error: what, where, got, and what instead; status 2; nothing is lost."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Finetune, Finished, Tiny, environment, write_recipe

from finetune import backend, catalog
from finetune.cli.main import main
from finetune.data.formats import FORMATS
from finetune.launchers.accelerate import EPHEMERAL, build_command, free_port, machines
from finetune.methods import METHODS
from finetune.planner import plan
from finetune.runs.run import Run, write_json

BACKENDS = ", ".join(backend.names())
KNOWN_FORMATS = ", ".join(sorted(FORMATS))


def errors(done: Finished) -> list[str]:
    """What a person is told, where that is all that is said and the status is that of a mistake."""
    assert done.status == 2, done.output
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith("error: ")] == []
    return [line.removeprefix("error: ") for line in lines]


class InProcess:
    """The command line in this process, which has torch already: an exception is a traceback."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.capfd = capfd

    def __call__(self, *words: str | Path) -> Finished:
        self.capfd.readouterr()
        status = main([str(word) for word in words])
        told = self.capfd.readouterr()
        return Finished(status, told.out, told.err)


@pytest.fixture
def run_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> InProcess:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return InProcess(capfd)


def one_step(tiny: Tiny, **sections: Any) -> dict[str, Any]:
    """A recipe of one step, in fp32 and without evaluation unless a section says so."""
    return tiny.fields(**{"max_steps": 1, "saving": {"every": 1}} | sections)


# What is told from a recipe's text alone.

TOLD: dict[str, tuple[list[str], list[str]]] = {
    "an unknown recipe": (
        ["show", "quickstrat"],
        ["recipe 'quickstrat': unknown; did you mean 'quickstart'?; `finetune list` shows all"],
    ),
    "a recipe file that is not there": (
        ["plan", "mine.yaml"],
        ["recipe mine.yaml: no such file"],
    ),
    "an unknown key": (
        ["show", "quickstart", "optim.ler=1e-4"],
        ["override: optim.ler: unknown key; did you mean 'lr'?"],
    ),
    "an unknown section": (
        ["show", "quickstart", "optimizer.lr=1e-4"],
        ["override: optimizer: unknown key; did you mean 'optim'?"],
    ),
    "an unknown key in a list": (
        ["show", "quickstart", "data.0.fromat=text"],
        ["override: data.0.fromat: unknown key; did you mean 'format'?"],
    ),
    "a key like none": (
        ["show", "quickstart", "saving.zzz=1"],
        ["override: saving.zzz: unknown key; known are every, keep, background, rehearse"],
    ),
    "a value of a list of words": (
        ["show", "quickstart", "optim.name=adamv"],
        [
            "override: optim.name: got 'adamv', expected adamw or adamw_8bit or paged_adamw_8bit "
            "or adafactor or muon; did you mean 'adamw'?"
        ],
    ),
    "a value of the wrong type": (
        ["show", "quickstart", "batch.rows=many"],
        [
            "override: batch.rows: Input should be a valid integer, unable to parse string as an "
            "integer, got 'many'"
        ],
    ),
    "a value out of range": (
        ["show", "quickstart", "adapter.r=0"],
        ["override: adapter.r: Input should be greater than 0, got 0"],
    ),
    "numbers without an end": (
        ["show", "quickstart", "epochs=inf", "optim.lr=nan"],
        [
            "override: optim.lr: Input should be a finite number, got nan",
            "override: epochs: Input should be a finite number, got inf",
        ],
    ),
    "an unknown method": (
        ["show", "quickstart", "method=stf"],
        [
            f"override: method: got 'stf', expected one of {', '.join(METHODS)}, or "
            "module:attribute of your own; did you mean 'sft'?"
        ],
    ),
    "a word that is no override": (
        ["show", "quickstart", "optim.lr"],
        ["'optim.lr': expected key=value"],
    ),
    "an override without a key": (
        ["show", "quickstart", "=3"],
        ["'=3': expected key=value"],
    ),
    "a row of a list that is not there": (
        ["show", "quickstart", "data.7.first=3"],
        ["data.7.first: there is no such place in the recipe"],
    ),
    "a place inside a value": (
        ["show", "quickstart", "optim.lr.x=3"],
        ["optim.lr.x: there is no such place in the recipe"],
    ),
    "three problems at once": (
        ["show", "quickstart", "lr", "optim.ler=1", "adapter.r=0"],
        [
            "'lr': expected key=value",
            "override: adapter.r: Input should be greater than 0, got 0",
            "override: optim.ler: unknown key; did you mean 'lr'?",
        ],
    ),
    "a key and a backend that are not there": (
        ["train", "quickstart", "optim.ler=1", "--backend", "fsdp_ful_shard"],
        [
            "override: optim.ler: unknown key; did you mean 'lr'?",
            "backend 'fsdp_ful_shard': unknown; did you mean 'fsdp_full_shard'?; known are "
            f"{BACKENDS}",
        ],
    ),
    "an unknown backend": (
        ["plan", "quickstart", "--backend", "fsdp_ful_shard"],
        [
            "backend 'fsdp_ful_shard': unknown; did you mean 'fsdp_full_shard'?; known are "
            f"{BACKENDS}"
        ],
    ),
    "a backend's file that is not there": (
        ["plan", "quickstart", "--backend", "mine.yaml"],
        ["backend mine.yaml: no such file"],
    ),
    "an unknown format and a batch that does not divide": (
        ["plan", "quickstart", "data.0.format=mesages", "batch.rows=24", "--backend", "ddp"],
        [
            "batch.rows: 24 does not divide into micro-batches of 16 rows on 2 processes "
            "(16 x 2 = 32); use batch.rows=32",
            "data.format: 'mesages' is not a format; did you mean 'messages'? "
            f"(known: {KNOWN_FORMATS})",
        ],
    ),
    "patterns that are none": (
        ["plan", "quickstart", "adapter.targets=[q_proj", 'adapter.rank_pattern={"(v":4}'],
        [
            "adapter.targets: '[q_proj' is not a valid regular expression: unterminated "
            "character set at position 0",
            "adapter.rank_pattern.(v: '(v' is not a valid regular expression: missing ), "
            "unterminated subpattern at position 0",
        ],
    ),
    "a backend that this process cannot be": (
        ["train", "quickstart", "--backend", "ddp"],
        [
            "--backend ddp: `finetune train` starts one process; start several with `finetune "
            "launch --backend ddp`, `torchrun --nproc-per-node 2 -m finetune train`, or "
            f"`accelerate launch --config_file {ROOT}/accelerate_configs/ddp.yaml -m finetune "
            "train`"
        ],
    ),
    "a run that is not there": (
        ["report", "runs/none"],
        ["runs/none: not a run directory (it has no recipe.json)"],
    ),
    "a run to export that is not there": (
        ["export", "runs/none", "--to", "x"],
        ["runs/none: not a run directory (it has no recipe.json)"],
    ),
    "a run to evaluate that is not there": (
        ["eval", "runs/none"],
        [
            "runs/none: not a run directory (it has no recipe.json); for another model give "
            "--rows-of RUN, or --data FILE and --format"
        ],
    ),
    "a model to talk to that is not there": (
        ["chat", "runs/none"],
        ["runs/none: no such folder; name a run, or a folder with a model"],
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_mistake_is_reported_with_its_place_and_a_fix(
    name: str, finetune: Finetune, tmp_path: Path
) -> None:
    words, told = TOLD[name]
    assert errors(finetune(*words, cwd=tmp_path)) == told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("r.json", "{", "cannot be read: Expecting property name enclosed in double quotes"),
        ("r.yaml", "a: [1", "cannot be read: line 2 column 1: did not find expected ',' or ']'"),
        ("r.yaml", "- 1\n", "expected keys and values, got list"),
        ("r.json", "{}", "method: got None, expected one of sft, pretrain, dpo"),
        ("r.json", '{"method": "sft", "modle": {}}', "modle: unknown key; did you mean 'model'?"),
        (
            "r.json",
            '{"method": "sft", "model": {"nmae": "a"}}',
            "model.nmae: unknown key; did you mean 'name'?",
        ),
    ],
)
def test_a_broken_recipe_is_named_with_its_problem(
    finetune: Finetune, tmp_path: Path, file: str, text: str, told: str
) -> None:
    (tmp_path / file).write_text(text)
    done = finetune("show", file, cwd=tmp_path)
    assert done.status == 2
    assert done.stderr.startswith(f"error: {file}: {told}")
    assert "Traceback" not in done.output


def test_a_recipe_that_is_not_utf8_is_named(finetune: Finetune, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"method: sft # \xe9\n")
    (told,) = errors(finetune("show", "r.yaml", cwd=tmp_path))
    assert told.startswith("r.yaml: cannot be read: 'utf-8' codec can't decode byte 0xe9")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("recipe = 3", "r.py: expected one `recipe = ...`, found 0"),
        ("from finetune import SFT\n\nrecipe = STF()", "r.py:3: NameError: name 'STF' is not"),
        ("from finetune import SFT\na = SFT()\nb = SFT(seed=1)", "r.py: expected one `recipe ="),
        ("import finetune\nopen('gone.txt')", "r.py:2: FileNotFoundError: [Errno 2] No such file"),
        ("def recipe(:", "r.py: SyntaxError: "),
        (
            "from finetune import SFT\nrecipe = SFT().with_lora(dropuot=4)",
            "r.py: LoRA: dropuot: unknown key; did you mean 'dropout'?",
        ),
        (
            "from finetune import SFT\nrecipe = SFT().with_batch(row=4)",
            "r.py: Batch: row: unknown key; did you mean 'rows'?",
        ),
        (
            "from finetune import SFT\nrecipe = SFT(epochs=-1)",
            "r.py: SFT: epochs: Input should be greater than 0, got -1",
        ),
    ],
)
def test_a_failing_python_recipe_is_reported_without_a_traceback(
    finetune: Finetune, tmp_path: Path, code: str, told: str
) -> None:
    (tmp_path / "r.py").write_text(code)
    assert errors(finetune("show", "r.py", cwd=tmp_path))[0].startswith(told)


# What is told from the files that a recipe names, still without torch.


def test_all_missing_files_and_plan_problems_are_reported_at_once(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    fields = tiny.fields(
        model={"name": "no/such/folder"},
        data=[{"source": "dta.jsonl", "format": "messages"}],
        eval_data=[{"source": "data.jsonl", "format": "mesages"}],
        batch={"rows": 7, "micro_rows": 2},
    )
    shutil.copy(tiny.data, tmp_path / "data.jsonl")
    recipe = write_recipe(tmp_path / "r.json", fields)
    for words in (["train"], ["launch", "--backend", "ddp", "--processes", "1"]):
        verb, *flags = words
        told = errors(finetune(verb, recipe, *flags, cwd=tmp_path))
        divides = "use batch.rows=6 or 8"
        assert told[0] == (
            "batch.rows: 7 does not divide into micro-batches of 2 rows on 1 process "
            f"(2 x 1 = 2); {divides}"
        )
        if verb == "launch":
            assert told.pop(1) == "processes: ddp needs at least 2, got 1; use single"
        assert told[1:] == [
            "model.name: no such folder: no/such/folder; give a folder with config.json, or a hub "
            "id such as HuggingFaceTB/SmolLM2-135M",
            "data.source: no such file or folder: dta.jsonl; did you mean 'data.jsonl'?",
            "data.format: 'mesages' is not a format; did you mean 'messages'? "
            f"(known: {KNOWN_FORMATS})",
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "r.json"]


def test_a_plan_for_another_machine_reports_what_this_one_lacks(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    fields = tiny.fields(data=[{"source": "gone.jsonl", "format": "messages"}])
    recipe = write_recipe(tmp_path / "r.json", fields)
    for words in ([], ["--gpu", "H100-80"]):
        done = finetune("plan", recipe, *words, cwd=tmp_path)
        assert done.status == 0, done.output
        last = done.stdout.splitlines()[-1]
        assert last.startswith("not here     data.source: no such file or folder: gone.jsonl")
    whole = finetune("plan", write_recipe(tmp_path / "whole.json", tiny.fields()), cwd=tmp_path)
    assert "not here" not in whole.stdout


def test_a_folder_without_a_model_and_a_file_for_a_folder_are_reported(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    weights = tiny.model / "model.safetensors"
    model = {"name": str(tmp_path / "empty"), "tokenizer": str(weights)}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(model=model))
    assert errors(finetune("train", recipe)) == [
        f"model.name: the folder {tmp_path}/empty contains no model (no config.json)",
        f"model.tokenizer: {weights} is a file; give its folder",
    ]


def test_weight_files_that_an_index_names_and_that_are_missing_are_reported(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    (model / "model.safetensors").rename(model / "model-00001-of-00003.safetensors")
    names = {str(n): f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(model={"name": str(model)}))
    told = (
        f"model.name: {model} lacks {names['2']} and 1 more, which its index of the weights names; "
        "copy the folder again"
    )
    assert errors(finetune("train", recipe)) == [told]
    assert f"not here     {told}" in finetune("plan", recipe).stdout.splitlines()


# What is told once the files are read.

BAD_DATA: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "{path}: the file is empty"),
    "a file that is not UTF-8": (
        b'\n{"a": "caf\xe9"}\n',
        "{path} row 2: not UTF-8 (byte 10 of the line is 0xe9); convert it from its "
        "encoding, as in iconv -f LATIN1 -t UTF-8",
    ),
    "a row without its column": (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        b'{"question": "a", "answer": "b"}\n',
        "{path} row 2: format 'messages' needs 'messages', the row has 'question', 'answer'; "
        "format 'question_answer' would fit",
    ),
    "rows with nothing to train on": (
        b'{"messages": [{"role": "user", "content": "a"}]}\n',
        "{path}: none of its 1 rows is left to train on (1 without a trained token, 0 longer than "
        "batch.max_length=128, 0 skipped by format 'messages')",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_named_with_its_row_and_leaves_the_directory_free(
    name: str, tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    content, told = BAD_DATA[name]
    source = tmp_path / "train.jsonl"
    source.write_bytes(content)
    recipe = write_recipe(
        tmp_path / "r.json", one_step(tiny, data=[{"source": str(source), "format": "messages"}])
    )
    output = tmp_path / "run"
    done = run_here("train", recipe, "--precision", "fp32", "--output", output)
    assert errors(done)[0].startswith(told.format(path=source))
    assert list(output.iterdir()) == []
    # Mended, the same words train: the mistake has not taken the directory.
    shutil.copy(tiny.data, source)
    again = run_here("train", recipe, "--precision", "fp32", "--output", output)
    assert again.status == 0, again.output
    assert Run(output).steps() == [1]


def test_a_mistake_found_by_a_worker_is_reported_without_a_traceback(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    """The same in a process of its own, whose every line is seen."""
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    for path in model.glob("token*"):
        path.unlink()
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny, model={"name": str(model)}))
    (told,) = errors(finetune("train", recipe, "--output", tmp_path / "run"))
    assert told.startswith(f"model.name: no tokenizer can be loaded from '{model}' (")
    assert told.endswith("name a folder with tokenizer.json, or set model.tokenizer")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            "{% for m in messages %}{{ m.content }} {% endfor %}",
            "which is not an end token of this tokenizer, so a model could not learn to stop; end "
            "it with {{ eos_token }} (as the built-in 'plain' does) or add the token to the "
            "tokenizer",
        ),
        (None, "chatml"),
    ],
)
def test_a_template_that_cannot_mark_assistant_turns_is_refused(
    tiny: Tiny, run_here: InProcess, tmp_path: Path, template: str | None, told: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    (model / "chat_template.jinja").unlink()
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny, model={"name": str(model)}))
    problems = errors(run_here("train", recipe, "--output", tmp_path / "run"))
    assert told in problems[0]
    assert problems[0].startswith(f"{tiny.data} row 1")


def test_targets_that_match_no_module_are_refused(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    fields = one_step(tiny, adapter={"targets": ["q_prj"]})
    recipe = write_recipe(tmp_path / "r.json", fields)
    (told,) = errors(run_here("train", recipe, "--output", tmp_path / "run"))
    assert told.startswith("adapter.targets: ")
    assert told.endswith(
        "linear modules here: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, "
        "v_proj"
    )


def test_each_adapter_name_that_matches_no_module_is_reported(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    adapter = {
        "targets": ["q_proj", "v_porj"],
        "modules_to_save": ["embed_token"],
        "exclude_modules": ["mlp.up_prj"],
        "rank_pattern": {"q_pro": 4, r"layers\.0\..*": 2},
        "alpha_pattern": {"[qv]_proj": 4, "zz": 3},
    }
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny, adapter=adapter))
    assert errors(run_here("train", recipe, "--output", tmp_path / "run")) == [
        "adapter.targets: no module is named 'v_porj'; did you mean 'v_proj'?; linear modules "
        "here: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj",
        "adapter.modules_to_save: no module is named 'embed_token'; did you mean 'embed_tokens'?",
        "adapter.exclude_modules: no module is named 'mlp.up_prj'; did you mean 'up_proj'?",
        "adapter.rank_pattern: no module matches 'q_pro'; did you mean 'q_proj'?",
        "adapter.alpha_pattern: no module matches 'zz'",
    ]


def test_a_tokenizer_of_another_model_is_reported(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    config = json.loads((tiny.model / "config.json").read_text()) | {"vocab_size": 20}
    model = {"config": config, "tokenizer": str(tiny.model), "name": None}
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny, model=model))
    (told,) = errors(run_here("train", recipe, "--output", tmp_path / "run"))
    assert told.startswith(f"model.tokenizer: '{tiny.model}' gave the token ")
    assert told.endswith(
        "but the model has 20; 296 of its tokens have no row: name the tokenizer that belongs to it"
    )


def test_truncated_weights_are_reported(tiny: Tiny, run_here: InProcess, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny, model={"name": str(model)}))
    (told,) = errors(run_here("train", recipe, "--output", tmp_path / "run"))
    assert told.startswith(f"model.name: '{model}' cannot be loaded: ")


def lengths_of(tiny: Tiny, file: Path) -> list[int]:
    """Tokens of each conversation of a file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    return [len(tokenizer.apply_chat_template(row)["input_ids"]) for row in rows]


def with_config(tiny: Tiny, folder: Path, **changes: Any) -> Path:
    """A copy of the tiny model whose config.json says something else."""
    shutil.copytree(tiny.model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_missing_tracker_is_reported_before_anything_is_created(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    absent = [name for name in ("wandb", "mlflow", "trackio") if find_spec(name) is None]
    if not absent:
        pytest.skip("every tracker is installed")
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny) | {"trackers": absent})
    assert errors(run_here("train", recipe, "--output", tmp_path / "run")) == [
        f"trackers: '{name}' is not installed; run: pip install {name}" for name in absent
    ]
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_fit_their_config_are_reported(
    tiny: Tiny, run_here: InProcess, finetune: Finetune, tmp_path: Path
) -> None:
    deeper = with_config(tiny, tmp_path / "deeper", num_hidden_layers=3)
    wider = with_config(tiny, tmp_path / "wider", intermediate_size=200)
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny))
    advice = "; fix config.json, or name a folder whose weights are complete"

    (told,) = errors(run_here("train", recipe, f"model.name={deeper}", "--output", tmp_path / "a"))
    assert told.startswith(
        f"model.name: the weights of '{deeper}' do not fit its config.json: "
        "the tensor model.layers.2.input_layernorm.weight is missing; "
    )
    assert told.endswith(f"; and 4 more like these{advice}")  # 9 tensors a layer
    (told,) = errors(run_here("train", recipe, f"model.name={wider}", "--output", tmp_path / "b"))
    assert told.startswith(
        f"model.name: the weights of '{wider}' do not fit its config.json: "
        "the tensor model.layers.0.mlp.down_proj.weight is [64, 192] instead of [64, 200]; "
    )
    assert told.endswith(f"; and 1 more like these{advice}")  # 3 tensors in each of 2 layers
    # ZeRO-3 loads in a way of its own, of which the first rank alone sees the shapes.
    words = ("--backend", "zero3", "--processes", "2", "--precision", "fp32")
    done = finetune("launch", recipe, f"model.name={wider}", *words, "--output", tmp_path / "c")
    assert done.status == 2
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "config.json: size mismatch for model.layers.0.mlp.gate_proj.weight: " in told
    assert told.endswith(f"; and 1 more like these{advice}")


def test_rows_beyond_the_context_of_the_model_are_reported(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny))
    lengths = lengths_of(tiny, tiny.data) + lengths_of(tiny, tiny.eval_data)
    longest = max(lengths)
    context = longest - 1
    shorter = with_config(tiny, tmp_path / "model", max_position_embeddings=context)
    words = ("train", recipe, f"model.name={shorter}", "--output", tmp_path / "run")
    said = (
        f"data: {lengths.count(longest)} of 56 rows are longer than the model's context of "
        f"{context} tokens, the longest {longest}; set batch.max_length={context}, and "
        "batch.overlong to drop, truncate or split"
    )
    assert errors(run_here(*words)) == [f"{said}; if this is intended, set data_checks=report"]
    assert list((tmp_path / "run").iterdir()) == []
    passed = run_here(*words, "data_checks=report")
    assert passed.status == 0
    told = "".join(passed.output.replace("│", "").split())
    assert said.replace(" ", "") in told
    # A model that learned its positions has none beyond them, whatever is asked.
    model = {"name": None, "tokenizer": str(tiny.model)}
    model["config"] = {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": context,
        "vocab_size": 512,
    }  # fmt: skip
    learned = write_recipe(tmp_path / "l.json", one_step(tiny, model=model))
    words = ("train", learned, "data_checks=report", "--output", tmp_path / "other")
    assert errors(run_here(*words)) == [f"{said}; it has no positions beyond that"]


def test_an_adapter_on_the_table_of_tokens_hides_no_vocabulary(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    fields = one_step(tiny, adapter={"targets": ["q_proj", "embed_tokens"]})
    recipe = write_recipe(tmp_path / "r.json", fields)
    done = run_here("train", recipe, "--output", tmp_path / "run")
    assert done.status == 0, done.output
    config = json.loads((tiny.model / "config.json").read_text()) | {"vocab_size": 20}
    model = {"config": config, "tokenizer": str(tiny.model), "name": None}
    fields = one_step(tiny, adapter=fields["adapter"], model=model)
    recipe = write_recipe(tmp_path / "r.json", fields)
    (told,) = errors(run_here("train", recipe, "--output", tmp_path / "other"))
    assert told.endswith(
        "but the model has 20; 296 of its tokens have no row: name the tokenizer that belongs to it"
    )


def test_rows_longer_than_the_context_are_counted_under_every_rule(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    lengths = lengths_of(tiny, tiny.data)
    limit = sorted(lengths)[len(lengths) // 2]
    longer = sum(length > limit for length in lengths)
    place = f"{tiny.data} row {lengths.index(max(lengths)) + 1}"
    batch = {"max_length": limit}
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny, batch=batch, eval_data=[],
                                                        evaluation={"every": None}))  # fmt: skip
    assert errors(run_here("train", recipe, "--output", tmp_path / "error")) == [
        f"{tiny.data}: {longer} of {len(lengths)} rows are longer than batch.max_length={limit} "
        f"tokens, the longest {max(lengths)} ({place}); set batch.max_length={max(lengths)}, or "
        "batch.overlong to drop, truncate or split"
    ]
    for rule, name in (("drop", "dropped"), ("truncate", "truncated"), ("split", "split")):
        run = Run(tmp_path / rule)
        done = run_here("train", recipe, f"batch.overlong={rule}", "--output", run.root)
        assert done.status == 0, done.output
        counts = json.loads(run.data.read_text())["train"]
        others = {"dropped", "truncated", "split"} - {name}
        assert counts[name] == longer
        assert {counts[other] for other in others} == {0}
        assert counts["samples"] == len(lengths)
        assert counts["longest_sample"] == max(lengths)


# The directory of a run.


def test_a_directory_is_never_taken_from_another_run(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny))
    output = tmp_path / "run"
    assert run_here("train", recipe, "--output", output).status == 0
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    online = {"on_reward_error", "reward_timeout", "sampling_rows", "vllm_server_base_url",
              "vllm_server_timeout"}  # fmt: skip
    free = f"Fields that may change: {', '.join(sorted(catalog.FREE_TO_CHANGE - online))}"
    changes = ("optim.lr=0.5", "batch.max_length=64", "saving.keep=9")
    assert errors(run_here("train", recipe, *changes, "--output", output)) == [
        f"{output}: contains a run of another recipe; choose another --output. They differ in "
        f"batch.max_length: 128 -> 64; optim.lr: 0.001 -> 0.5. {free}"
    ]
    assert errors(run_here("train", recipe, "optim.lr=0.5", "--resume", "--output", output)) == [
        f"{output}: contains a run of another recipe; choose another --output. They differ in "
        f"optim.lr: 0.001 -> 0.5. {free}"
    ]
    assert errors(run_here("train", recipe, "--output", output)) == [
        f"{output}: contains this recipe's run up to step 1; continue it with --resume, or choose "
        "another --output"
    ]
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_a_directory_with_other_files_is_left_alone(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny))
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "b.png").write_text("b")
    (folder / "a.png").write_text("a")
    assert errors(run_here("train", recipe, "--output", folder)) == [
        f"{folder}: not empty and not a run (it contains a.png and 1 more); choose another --output"
    ]
    assert errors(run_here("train", recipe, "--output", folder / "a.png")) == [
        f"{folder}/a.png: cannot be a run directory (File exists); choose another --output"
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "b.png"]


def test_a_failure_while_training_has_status_1(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    path = write_recipe(tmp_path / "r.json", one_step(tiny))
    run = Run(tmp_path / "run")
    write_json(run.recipe, catalog.to_fields(catalog.load(path)))
    run.checkpoints.write_text("a file where checkpoints should lie")
    done = run_here("train", path, "--output", run.root)
    assert done.status == 1
    assert "Traceback" not in done.output
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] != []


# Options.


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "finetune: error: the following arguments are required: COMMAND"),
        (["tarin"], "finetune: error: argument COMMAND: invalid choice: 'tarin'"),
        (["show"], "finetune show: error: the following arguments are required: recipe"),
        (["plan", "quickstart", "--processes", "0"],
         "finetune plan: error: argument --processes: got '0', expected a whole number of at "
         "least 1"),
        (["plan", "quickstart", "--precision", "fp8"],
         "finetune plan: error: argument --precision: invalid choice: 'fp8'"),
        (["plan", "quickstart", "--procesess", "2"],
         "finetune plan: error: unrecognized arguments: --procesess 2; did you mean "
         "'--processes'?"),
        (["list", "--jsn"],
         "finetune list: error: unrecognized arguments: --jsn; did you mean '--json'?"),
        (["train", "quickstart", "--num_machines", "2"],
         "finetune train: error: unrecognized arguments: --num_machines 2"),
        (["plan", "quickstart", "--tensor", "2", "--tensor", "4"],
         "finetune plan: error: --tensor: given as 2 and as 4; give it once"),
        (["train", "quickstart", "--resume", "auto", "--resume"],
         "finetune train: error: --resume: given as auto and as yes; give it once"),
    ],
)  # fmt: skip
def test_words_that_cannot_be_read_are_refused_with_the_usage(
    finetune: Finetune, words: list[str], told: str
) -> None:
    done = finetune(*words)
    assert done.status == 2
    assert done.stdout == ""
    assert done.stderr.startswith("usage: finetune")
    assert done.stderr.splitlines()[-1].startswith(told)


def test_an_option_may_be_repeated_with_the_same_value(finetune: Finetune) -> None:
    words = ("plan", "quickstart", "--backend", "ddp", "--processes", "2", "--json")
    done = finetune(*words, "--processes", "2")
    assert json.loads(done.stdout)["processes"] == 2


THREAD_IN_A_LIBRARY = """
import atexit, sys, threading
from concurrent.futures import ThreadPoolExecutor
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("beat", "1")
def live():
    while True:
        store.get("beat")
threading.Thread(target=live, daemon=True).start()
pool = ThreadPoolExecutor()
pool.submit(print, "in a pool").result()
atexit.register(print, "at the end")
sys.argv = ["finetune", "list"]
from finetune.cli.main import run
run()
"""


def test_a_thread_in_a_library_does_not_abort_a_process_that_is_done() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREAD_IN_A_LIBRARY],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr  # -6 where the interpreter is taken down
    first, *listed, last = done.stdout.splitlines()
    assert (first, last) == ("in a pool", "at the end")
    assert any("quickstart" in line for line in listed)
    assert done.stderr == ""


def test_launches_at_the_same_time_meet_on_ports_of_their_own() -> None:
    """Nor on one that the system may give to a connection before the job has begun."""
    code = "from finetune.launchers.accelerate import free_port; print(free_port())"
    command = [sys.executable, "-c", code]
    at_once = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    ports = {int(process.communicate()[0]) for process in at_once} | {free_port(), free_port()}
    assert len(ports) == 6
    assert max(ports) < int(EPHEMERAL.read_text().split()[0])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 1),
        (["--num_machines", "2", "--machine_rank", "1"], 2),
        (["--machine_rank=1", "--num-machines=4"], 4),
        (["--num_machines", "many"], 1),  # which `accelerate launch` refuses
    ],
)
def test_machines_of_a_job_are_read_from_its_flags(flags: list[str], expected: int) -> None:
    assert machines(flags) == expected


@pytest.mark.parametrize("flags", [["--num_machines", "2"], ["--num-machines=2"]])
def test_deepspeed_on_several_machines_starts_each_ones_own_processes(flags: list[str]) -> None:
    words = build_command(plan(catalog.resolve("smollm2_135m_full"), "zero2", 2), [], flags)
    assert words[words.index("--deepspeed_multinode_launcher") + 1] == "standard"


def test_launch_passes_unknown_flags_to_accelerate(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny))
    done = finetune("launch", recipe, "--no_such_flag", "--output", tmp_path / "run")
    assert done.status == 2
    lines = done.stderr.splitlines()
    assert lines[-2].endswith("unrecognized arguments: --no_such_flag")
    assert lines[-1] == (
        "error: `accelerate launch` does not accept these flags; its message is above; for the "
        "flags of this command: finetune launch --help"
    )
    assert not (tmp_path / "run").exists()


def test_overrides_may_follow_options(finetune: Finetune) -> None:
    words = ("plan", "quickstart", "--backend", "ddp", "optim.lr=1e-4", "--json", "batch.rows=64")
    told = json.loads(finetune(*words, "--processes", "4", "optim.lr=2e-4").stdout)
    assert (told["lr"], told["rows_per_step"], told["processes"]) == (2e-4, 64, 4)
    assert told["backend"] == "ddp"


# What answers at once.

LISTING = (["list"], ["show", "quickstart"])
QUICK = (*LISTING, ["plan", "quickstart", "--backend", "ddp"])


@pytest.mark.parametrize("words", QUICK, ids=lambda words: words[0])
def test_quick_verbs_import_no_torch(words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from finetune.cli.main import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'accelerate', 'peft', 'datasets', 'deepspeed', 'numpy'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path,  # without a base of a quickstart
        env=environment(tmp_path), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("words", LISTING, ids=lambda words: words[0])
def test_list_and_show_answer_at_once(words: list[str], tmp_path: Path) -> None:
    """Compiled, in processor time beside that of importing the libraries that they are made with.

    0.28 s and 0.095 s on an AMD EPYC with AVX-512; a slow machine is slow at both.
    """
    variables = environment(tmp_path)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)

    def least(*command: str) -> float:
        spent = []
        for _ in range(3):
            process = subprocess.Popen(
                [sys.executable, *command], env=variables, stdout=subprocess.DEVNULL
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            spent.append(usage.ru_utime + usage.ru_stime)
        return min(spent)

    libraries = least("-c", "import pydantic, yaml, rich.console, rich.table")
    assert least("-m", "finetune", *words) < 5 * libraries


def test_list_names_every_recipe_and_backend_with_its_sentence(finetune: Finetune) -> None:
    told = json.loads(finetune("list", "--json").stdout)
    paths = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert told["recipes"].keys() == paths
    assert sorted(told["backends"]) == backend.names()
    assert all(told["recipes"].values())
    assert all(told["backends"].values())
    shown = finetune("list").stdout
    for name, summary in (told["recipes"] | told["backends"]).items():
        assert any(line.split(maxsplit=1) == [name, summary] for line in shown.splitlines())


def test_show_prints_a_recipe_that_can_be_read_again(finetune: Finetune, tmp_path: Path) -> None:
    recipe = catalog.resolve("qwen3_8b_qlora", ["optim.lr=1e-5"])
    words = ("show", "qwen3_8b_qlora", "optim.lr=1e-5")
    as_json, as_yaml = finetune(*words, "--json").stdout, finetune(*words).stdout
    assert json.loads(as_json) == catalog.to_fields(recipe)
    assert yaml.safe_load(as_yaml)["model"] == catalog.to_fields(recipe)["model"]
    for name, text in (("r.json", as_json), ("r.yaml", as_yaml)):
        (tmp_path / name).write_text(text)
        assert catalog.load(tmp_path / name) == recipe


def test_plan_reports_the_same_as_json_and_as_text(finetune: Finetune) -> None:
    words = ("plan", "qwen3_8b_lora", "--backend", "fsdp_full_shard", "--processes", "4")
    told = json.loads(finetune(*words, "--json").stdout)
    assert told["engine"] == "fsdp"
    assert told["shard"] == "params"
    product = told["micro_rows"] * told["accumulation"] * told["processes"]
    assert product == told["rows_per_step"] == catalog.resolve("qwen3_8b_lora").batch.rows
    line = f"{told['micro_rows']} micro x {told['accumulation']} accumulation x 4 processes"
    assert line in finetune(*words).stdout


# Several processes.


def test_a_mistake_is_reported_once_for_any_number_of_processes(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    """Found by the processes, not before: one line, and nothing of torch's own report."""
    source = tmp_path / "train.jsonl"
    source.write_text('{"question": "a", "answer": "b"}\n')
    fields = one_step(tiny, data=[{"source": str(source), "format": "messages"}])
    recipe = write_recipe(tmp_path / "r.json", fields)
    words = ("--backend", "ddp", "--processes", "2", "--output", tmp_path / "run")
    done = finetune("launch", recipe, *words)
    assert done.status == 2
    assert "Traceback" not in done.output
    assert "ChildFailedError" not in done.output
    (told,) = [line for line in done.output.splitlines() if "error" in line.lower()]
    assert told.startswith(f"error: {source} row 1: format 'messages' needs 'messages'")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_without_the_files_of_a_tokenizer_has_none(
    tiny: Tiny, run_here: InProcess, tmp_path: Path
) -> None:
    """For some types transformers 5.23 builds an empty one there: texts become nothing."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny, model={"name": str(model)}))
    (told,) = errors(run_here("train", recipe, "--output", tmp_path / "run"))
    assert told.startswith(f"model.name: no tokenizer can be loaded from '{model}' (the vocabulary")
