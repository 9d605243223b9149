"""Bad input gets a clear error: what, where, got, and what instead; status 2; nothing is lost."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Finetune, Finished, Tiny, run_command, write_recipe

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


@pytest.fixture
def run_here(capfd, monkeypatch, tmp_path) -> Finetune:
    """The command line in this process, which has torch already: an exception is a traceback."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> Finished:
        capfd.readouterr()
        quiet = ["--no-plot"] if words[:1] == ("train",) else []
        try:
            status = main([*map(str, words), *quiet])
        except SystemExit as ended:
            status = int(ended.code or 0)
        return Finished(status, *capfd.readouterr())

    return run


def one_step(tiny: Tiny, **sections: Any) -> dict[str, Any]:
    """A recipe of one step, in fp32 and without evaluation unless a section says so."""
    return tiny.fields(**{"max_steps": 1, "saving": {"every": 1}} | sections)


@pytest.fixture
def told(tiny, run_here, tmp_path) -> Callable[..., list[str]]:
    """The errors of a training of one step: `told("seed=1", adapter={"r": 2})`."""

    def told(*words: str, output: str = "run", **sections: Any) -> list[str]:
        recipe = write_recipe(tmp_path / "r.json", one_step(tiny, **sections))
        return errors(run_here("train", recipe, *words, "--output", tmp_path / output))

    return told


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny.model, tmp_path / "model"))


TOLD = f"""
$ show quickstrat
recipe 'quickstrat': unknown; did you mean 'quickstart'?; `finetune list` shows all
$ plan mine.yaml
recipe mine.yaml: no such file
$ show quickstart optim.ler=1e-4
override: optim.ler: unknown key; did you mean 'lr'?
$ show quickstart optim.name=adamv
override: optim.name: got 'adamv', expected one of adamw, adamw_8bit, adamw_4bit,
    paged_adamw_8bit, schedule_free_adamw, adafactor, muon, lion, sgd, or module:Class of a
    torch.optim.Optimizer; did you mean 'adamw'?
$ show quickstart method=stf
override: method: got 'stf', expected one of {", ".join(METHODS)}, or module:attribute of your own;
    did you mean 'sft'?
$ show quickstart lr optim.ler=1 adapter.r=0
'lr': expected key=value
override: adapter.r: Input should be greater than 0, got 0
override: optim.ler: unknown key; did you mean 'lr'?
$ train quickstart optim.ler=1 --backend fsdp_ful_shard
override: optim.ler: unknown key; did you mean 'lr'?
backend 'fsdp_ful_shard': unknown; did you mean 'fsdp_full_shard'?; known are {BACKENDS}
$ plan quickstart --backend mine.yaml
backend mine.yaml: no such file
$ plan quickstart data.0.format=mesages batch.rows=24 --backend ddp
batch.rows: 24 does not divide into micro-batches of 16 rows on 2 processes (16 x 2 = 32); use
    batch.rows=32
data.format: 'mesages' is not a format; did you mean 'messages'? (known: {KNOWN_FORMATS})
$ plan quickstart 'adapter.targets=[q_proj' 'adapter.rank_pattern={{"(v":4}}'
adapter.targets: '[q_proj' is not a valid regular expression: unterminated character set at
    position 0
adapter.rank_pattern.(v: '(v' is not a valid regular expression: missing ), unterminated subpattern
    at position 0
$ train quickstart --backend ddp
--backend ddp: `finetune train` starts one process; start several with `finetune launch --backend
    ddp`, `torchrun --nproc-per-node 2 -m finetune train`, or `accelerate launch --config_file
    {ROOT}/accelerate_configs/ddp.yaml -m finetune train`
$ export runs/none --to x
runs/none: not a run directory (it has no recipe.json)
$ eval runs/none
runs/none: not a run directory (it has no recipe.json); for another model give --rows-of RUN, or
    --data FILE and --format
$ chat runs/none
runs/none: no such folder; name a run, or a folder with a model
"""
"""Commands, each with the errors of it; an indented line goes on."""
COMMANDS = [each.strip().splitlines() for each in TOLD.replace("\n    ", " ").split("\n$ ")[1:]]


@pytest.mark.parametrize("case", COMMANDS, ids=lambda case: case[0])
def test_a_mistake_is_reported_with_its_place_and_a_fix(case, run_here, tmp_path):
    command, *told = case
    assert errors(run_here(*shlex.split(command))) == told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("r.json", "{", "cannot be read: Expecting property name enclosed in double quotes"),
        ("r.yaml", "a: [1", "cannot be read: line 1 column 6: expected ',' or ']'"),
        ("r.yaml", "- 1\n", "expected keys and values, got list"),
        ("r.yaml", "a: \udce9", "cannot be read: 'utf-8' codec can't decode byte 0xe9"),
        ("r.json", "{}", "method: got None, expected one of sft, pretrain, dpo"),
        ("r.json", '{"method": "sft", "model": {"nmae": "a"}}', "model.nmae: unknown key; did you"),
        ("r.py", "recipe = 3", "expected one `recipe = ...`, found 0"),
        ("r.py", "SFT()\n\nrecipe = STF()", "4: NameError: name 'STF' is not"),
        ("r.py", "open('gone.txt')", "2: FileNotFoundError: [Errno 2] No such file"),
        ("r.py", "def recipe(:", "SyntaxError: "),
        ("r.py", "recipe = SFT().with_lora(dropuot=4)", "LoRA: dropuot: unknown key; did you mean"),
        ("r.py", "recipe = SFT(epochs=-1)", "SFT: epochs: Input should be greater than 0, got -1"),
    ],
)
def test_a_broken_recipe_is_named_with_its_problem(run_here, tmp_path, file, text, told):
    head = "from finetune import SFT\n" if file == "r.py" else ""
    (tmp_path / file).write_text(head + text, errors="surrogateescape")
    (first, *_) = errors(run_here("show", file))
    place = f"{file}:" if told[0].isdigit() else f"{file}: "
    assert first.startswith(place + told)


def test_all_missing_files_and_plan_problems_are_reported_at_once(tiny, run_here, tmp_path):
    fields = tiny.fields(
        model={"name": "no/such/folder"},
        data=[{"source": "dta.jsonl", "format": "messages"}],
        eval_data=[{"source": "data.jsonl", "format": "mesages"}],
        batch={"rows": 7, "micro_rows": 2},
    )
    shutil.copy(tiny.data, tmp_path / "data.jsonl")
    recipe = write_recipe(tmp_path / "r.json", fields)
    alone = ["processes: ddp needs at least 2, got 1; use single"]
    for (verb, *flags), more in (
        (["train"], []),
        ("launch --backend ddp --processes 1".split(), alone),
    ):
        assert errors(run_here(verb, recipe, *flags)) == [
            "batch.rows: 7 does not divide into micro-batches of 2 rows on 1 process "
            "(2 x 1 = 2); use batch.rows=6 or 8",
            *more,
            "model.name: no such folder: no/such/folder; give a folder with config.json, or a hub "
            "id such as HuggingFaceTB/SmolLM2-135M",
            "data.source: no such file or folder: dta.jsonl; did you mean 'data.jsonl'?",
            "data.format: 'mesages' is not a format; did you mean 'messages'? "
            f"(known: {KNOWN_FORMATS})",
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "r.json"]


def test_a_plan_for_another_machine_reports_what_this_one_lacks(tiny, run_here, tmp_path):
    fields = tiny.fields(data=[{"source": "gone.jsonl", "format": "messages"}])
    recipe = write_recipe(tmp_path / "r.json", fields)
    for words in ([], ["--gpu", "H100-80"]):
        last = run_here("plan", recipe, *words).passed().stdout.splitlines()[-1]
        assert last.startswith("not here     data.source: no such file or folder: gone.jsonl")
    whole = run_here("plan", write_recipe(tmp_path / "whole.json", tiny.fields()))
    assert "not here" not in whole.stdout


def test_a_folder_without_a_model_and_a_file_for_a_folder_are_reported(tiny, told, tmp_path):
    (tmp_path / "empty").mkdir()
    weights = tiny.model / "model.safetensors"
    assert told(model={"name": str(tmp_path / "empty"), "tokenizer": str(weights)}) == [
        f"model.name: the folder {tmp_path}/empty contains no model (no config.json)",
        f"model.tokenizer: {weights} is a file; give its folder",
    ]


def test_weight_files_that_an_index_names_and_that_are_missing_are_reported(
    model, told, run_here, tmp_path
):
    (model / "model.safetensors").rename(model / "model-00001-of-00003.safetensors")
    names = {str(n): f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    lacks = (
        f"model.name: {model} lacks {names['2']} and 1 more, which its index of the weights names; "
        "copy the folder again"
    )
    assert told(model={"name": str(model)}) == [lacks]
    assert f"not here     {lacks}" in run_here("plan", tmp_path / "r.json").stdout.splitlines()


def test_bad_data_is_named_with_its_row_and_leaves_the_directory_free(
    tiny, told, run_here, tmp_path
):
    source, output = tmp_path / "train.jsonl", tmp_path / "run"
    data = [{"source": str(source), "format": "messages"}]
    source.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (problem,) = told("--precision", "fp32", data=data)
    assert problem.startswith(f"{source}: none of its 1 rows is left to train on (1 without a ")
    assert list(output.iterdir()) == []
    # Corrected, the same words train: the mistakes have not taken the directory.
    shutil.copy(tiny.data, source)
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny, data=data))
    run_here("train", recipe, "--precision", "fp32", "--output", output).passed()
    assert Run(output).steps() == [1]


@pytest.mark.parametrize("adapter", [None, {"targets": ["q_proj", "embed_tokens"]}])
def test_a_tokenizer_of_another_model_is_reported(tiny, told, train, adapter):
    """Also behind an adapter on the table of tokens, which trains otherwise."""
    config = json.loads((tiny.model / "config.json").read_text()) | {"vocab_size": 20}
    model = {"config": config, "tokenizer": str(tiny.model), "name": None}
    (told,) = told(model=model, adapter=adapter)
    assert told.startswith(f"model.tokenizer: '{tiny.model}' gave the token ")
    assert told.endswith(
        "but the model has 20; 296 of its tokens have no row: name the tokenizer that belongs to it"
    )
    if adapter:
        assert train("whole", adapter=adapter, max_steps=1).steps() == [1]


def test_truncated_weights_are_reported(model, told):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (told,) = told(model={"name": str(model)})
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


def test_weights_that_do_not_fit_their_config_are_reported(tiny, told, finetune, tmp_path):
    deeper = with_config(tiny, tmp_path / "deeper", num_hidden_layers=3)
    wider = with_config(tiny, tmp_path / "wider", intermediate_size=200)
    advice = "; fix config.json, or name a folder whose weights are complete"
    for folder, tensor, others in (
        (deeper, "model.layers.2.input_layernorm.weight is missing", 4),  # 9 tensors a layer
        (wider, "model.layers.0.mlp.down_proj.weight is [64, 192] instead of [64, 200]", 1),  # 3 in
    ):  # each of 2 layers
        (problem,) = told(f"model.name={folder}")
        begin = f"model.name: the weights of '{folder}' do not fit its config.json: the tensor "
        assert problem.startswith(f"{begin}{tensor}; ")
        assert problem.endswith(f"; and {others} more like these{advice}")
    # ZeRO-3 loads in a way of its own, of which the first rank alone sees the shapes.
    words = (f"model.name={wider}", *"--backend zero3 --processes 2 --precision fp32".split())
    said = finetune("launch", tmp_path / "r.json", *words, "--output", tmp_path / "c").refused()
    (problem,) = [line for line in said.splitlines() if line.startswith("error")]
    assert "config.json: size mismatch for model.layers.0.mlp.gate_proj.weight: " in problem
    assert problem.endswith(f"; and 1 more like these{advice}")


def test_rows_beyond_the_context_of_the_model_are_reported(tiny, told, run_here, tmp_path):
    lengths = lengths_of(tiny, tiny.data) + lengths_of(tiny, tiny.eval_data)
    longest = max(lengths)
    context = longest - 1
    shorter = with_config(tiny, tmp_path / "model", max_position_embeddings=context)
    said = (
        f"data: {lengths.count(longest)} of 56 rows are longer than the model's context of "
        f"{context} tokens, the longest {longest}; set batch.max_length={context}, and "
        "batch.overlong to drop, truncate or split"
    )
    name = f"model.name={shorter}"
    assert told(name) == [f"{said}; if this is intended, set data_checks=report"]
    assert list((tmp_path / "run").iterdir()) == []
    words = ("train", tmp_path / "r.json", name, "data_checks=report")
    passed = run_here(*words, "--output", tmp_path / "passed").passed()
    assert said.replace(" ", "") in "".join(passed.output.replace("│", "").split())
    # A model that learned its positions has none beyond them, whatever is asked.
    config = {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": context,
        "vocab_size": 512,
    }  # fmt: skip
    model = {"name": None, "tokenizer": str(tiny.model), "config": config}
    assert told("data_checks=report", model=model) == [f"{said}; it has no positions beyond that"]


def test_a_directory_is_never_taken_from_another_run(told, tiny, run_here, tmp_path):
    recipe, output = write_recipe(tmp_path / "r.json", one_step(tiny)), tmp_path / "run"
    assert run_here("train", recipe, "--output", output).status == 0
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    online = {"on_reward_error", "reward_timeout", "sampling_rows", "vllm_server_base_url",
              "vllm_server_timeout"}  # fmt: skip
    free = f"Fields that may change: {', '.join(sorted(catalog.FREE_TO_CHANGE - online))}"
    differ = f"{output}: contains a run of another recipe; choose another --output. They differ in "
    assert told("optim.lr=0.5", "batch.max_length=64", "saving.keep=9") == [
        f"{differ}batch.max_length: 128 -> 64; optim.lr: 0.001 -> 0.5. {free}"
    ]
    assert told("optim.lr=0.5", "--resume") == [f"{differ}optim.lr: 0.001 -> 0.5. {free}"]
    assert told() == [
        f"{output}: contains this recipe's run up to step 1; continue it with --resume, or choose "
        "another --output"
    ]
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_a_directory_with_other_files_is_left_alone(told, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("b.png", "a.png"):
        (folder / name).write_text(name)
    assert told() == [
        f"{folder}: not empty and not a run (it contains a.png and 1 more); choose another --output"
    ]
    assert told(output="run/a.png") == [
        f"{folder}/a.png: cannot be a run directory (File exists); choose another --output"
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "b.png"]


def test_a_failure_while_training_has_status_1(tiny, run_here, tmp_path):
    path = write_recipe(tmp_path / "r.json", one_step(tiny))
    run = Run(tmp_path / "run")
    write_json(run.recipe, catalog.to_fields(catalog.load(path)))
    run.checkpoints.write_text("a file where checkpoints should lie")
    done = run_here("train", path, "--output", run.root)
    assert done.status == 1
    assert "Traceback" not in done.output
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] != []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "error: the following arguments are required: COMMAND"),
        ("tarin", "error: argument COMMAND: invalid choice: 'tarin'"),
        ("show", "error: the following arguments are required: recipe"),
        ("plan quickstart --processes 0",
         "error: argument --processes: got '0', expected a whole number of at least 1"),
        ("plan quickstart --precision fp8", "error: argument --precision: invalid choice: 'fp8'"),
        ("plan quickstart --procesess 2",
         "error: unrecognized arguments: --procesess 2; did you mean '--processes'?"),
        ("list --jsn", "error: unrecognized arguments: --jsn; did you mean '--json'?"),
        ("train quickstart --num_machines 2",
         "error: unrecognized arguments: --num_machines 2"),
    ],
)  # fmt: skip
def test_words_that_cannot_be_read_are_refused_with_the_usage(run_here, words, told):
    verb = " ".join(["finetune", *words.split()[:1]]) if " " in words else "finetune"
    verb = {"show": "finetune show", "list --jsn": "finetune list"}.get(words, verb)
    done = run_here(*words.split())
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: finetune")
    assert done.stderr.splitlines()[-1].startswith(f"{verb}: {told}")


def test_overrides_may_follow_options_and_an_option_may_be_repeated_with_the_same_value(run_here):
    words = "plan quickstart --backend ddp optim.lr=1e-4 --json batch.rows=64 --processes 4"
    told = json.loads(run_here(*words.split(), "optim.lr=2e-4", "--processes", "4").stdout)
    assert (told["lr"], told["rows_per_step"], told["processes"]) == (2e-4, 64, 4)
    assert told["backend"] == "ddp"


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


def test_a_thread_in_a_library_does_not_abort_a_process_that_is_done(tmp_path):
    done = run_command([sys.executable, "-c", THREAD_IN_A_LIBRARY], tmp_path, seconds=60)
    assert done.status == 0, done.stderr  # -6 where the interpreter is taken down
    first, *listed, last = done.stdout.splitlines()
    assert (first, last) == ("in a pool", "at the end")
    assert any("quickstart" in line for line in listed)
    assert done.stderr == ""


def test_launches_at_the_same_time_meet_on_ports_of_their_own():
    """Nor on one that the system may give to a connection before the job has begun."""
    code = "from finetune.launchers.accelerate import free_port; print(free_port())"
    command = [sys.executable, "-c", code]
    at_once = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ports = {int(process.communicate()[0]) for process in at_once} | {free_port(), free_port()}
    assert len(ports) == 4
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
def test_machines_of_a_job_are_read_from_its_flags(flags, expected):
    assert machines(flags) == expected


@pytest.mark.parametrize("flags", [["--num_machines", "2"], ["--num-machines=2"]])
def test_deepspeed_on_several_machines_starts_each_ones_own_processes(flags):
    words = build_command(plan(catalog.resolve("smollm2_135m_full"), "zero2", 2), [], flags)
    assert words[words.index("--deepspeed_multinode_launcher") + 1] == "standard"


@pytest.mark.parametrize(
    "words",
    [
        "quickstart --output hf://b/run", "export runs/x --to s3://b/x",
        "eval runs/x --output https://b/x", "prove quickstart --output s3://b/p",
    ],
)  # fmt: skip
def test_an_address_is_not_taken_for_a_local_folder(words, run_here, tmp_path):
    told = run_here(*words.split()).refused()
    assert ":/b" in told
    assert "not a path on this machine; give a local path" in told
    assert not any(":" in path.name for path in tmp_path.iterdir())


def test_launch_passes_unknown_flags_to_accelerate(tiny, finetune, tmp_path):
    recipe = write_recipe(tmp_path / "r.json", one_step(tiny))
    said = finetune("launch", recipe, "--no_such_flag", "--output", tmp_path / "run").refused()
    lines = said.splitlines()
    assert lines[-2].endswith("unrecognized arguments: --no_such_flag")
    assert lines[-1] == (
        "error: `accelerate launch` does not accept these flags; its message is above; for the "
        "flags of this command: finetune launch --help"
    )
    assert not (tmp_path / "run").exists()


LIGHT = """
import sys
from finetune.cli.main import main
status = [main(words.split()) for words in sys.argv[1:]]
heavy = {'torch', 'transformers', 'accelerate', 'peft', 'datasets', 'deepspeed', 'numpy'}
print(status, heavy & set(sys.modules), file=sys.stderr)
"""


def test_quick_verbs_import_no_torch(tmp_path):
    verbs = ("list", "show quickstart", "plan quickstart --backend ddp")
    # In a folder without a base of a quickstart.
    words = [sys.executable, "-c", LIGHT, *verbs, "plan qwen3_0_6b_lora --gpu T4"]
    assert run_command(words, tmp_path).stderr == "[0, 0, 0, 0] set()\n"


def test_list_names_every_recipe_and_backend_with_its_sentence(run_here):
    told = json.loads(run_here("list", "--json").stdout)
    paths = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert (told["recipes"].keys(), sorted(told["backends"])) == (paths, backend.names())
    assert all(told["recipes"].values())
    assert all(told["backends"].values())
    shown = run_here("list").stdout
    for name, summary in (told["recipes"] | told["backends"]).items():
        assert any(line.split(maxsplit=1) == [name, summary] for line in shown.splitlines())


def test_show_prints_a_recipe_that_can_be_read_again(run_here, tmp_path):
    words = ("qwen3_8b_qlora", "optim.lr=1e-5")
    recipe = catalog.resolve(words[0], words[1:])
    as_json, as_yaml = (run_here("show", *words, *how).stdout for how in (["--json"], []))
    assert json.loads(as_json) == catalog.to_fields(recipe)
    assert yaml.safe_load(as_yaml)["model"] == catalog.to_fields(recipe)["model"]
    for name, text in (("r.json", as_json), ("r.yaml", as_yaml)):
        (tmp_path / name).write_text(text)
        assert catalog.load(tmp_path / name) == recipe


def test_plan_reports_the_same_as_json_and_as_text(run_here):
    words = ("plan", "qwen3_8b_lora", "--backend", "fsdp_full_shard", "--processes", "4")
    told = json.loads(run_here(*words, "--json").stdout)
    assert (told["engine"], told["shard"]) == ("fsdp", "params")
    product = told["micro_rows"] * told["accumulation"] * told["processes"]
    assert product == told["rows_per_step"] == catalog.resolve("qwen3_8b_lora").batch.rows
    line = f"{told['micro_rows']} micro x {told['accumulation']} accumulation x 4 processes"
    assert line in run_here(*words).stdout


def test_a_mistake_is_reported_once_for_any_number_of_processes(tiny, finetune, tmp_path):
    """Found by the processes, not before: one line, and nothing of torch's own report."""
    source = tmp_path / "train.jsonl"
    source.write_text('{"question": "a", "answer": "b"}\n')
    fields = one_step(tiny, data=[{"source": str(source), "format": "messages"}])
    recipe = write_recipe(tmp_path / "r.json", fields)
    words = ("--backend", "ddp", "--processes", "2", "--output", tmp_path / "run")
    said = finetune("launch", recipe, *words).refused()
    assert "ChildFailedError" not in said
    (told,) = [line for line in said.splitlines() if "error" in line.lower()]
    assert told.startswith(f"error: {source} row 1: format 'messages' needs 'messages'")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_without_the_files_of_a_tokenizer_has_none(told, tmp_path):
    """For some types transformers 5.23 builds an empty one there: texts become nothing."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
    (problem,) = told(model={"name": str(model)})
    assert problem.startswith(
        f"model.name: no tokenizer can be loaded from '{model}' (the vocabulary"
    )
