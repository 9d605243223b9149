"""A proof holds for what trains alike, and fails for everything that does not."""

import dataclasses
import json
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import method_matrix
import psutil
import pytest
import torch
from conftest import ROOT, Finetune, Finished, Tiny, Train, copy_of, start, wait_for, write_recipe
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import finetune as ft
from finetune import FinetuneError, Options, Run, backend, catalog
from finetune.cli import main as cli
from finetune.methods import METHODS, find_method
from finetune.planner import plan
from finetune.runs.run import write_json
from finetune.verification.proofs import checks
from finetune.verification.proofs.exports import Delivery, check_deliveries
from finetune.verification.proofs.matrix import BF16, FP32, Request, accepted_pairs, crossings_of
from finetune.verification.proofs.proof import Check, Proof, Refused
from finetune.verification.proofs.prove import named_backends
from finetune.verification.proofs.runs import Trial, family_of
from finetune.verification.proofs.shrink import shrink
from finetune.verification.proofs.small_recipe import Shape, Subject, make_subject, of_kind

SHAPE = Shape(processes=2, steps=10)
LORA: dict[str, Any] = {"adapter": {"r": 8, "dropout": 0.1}, "optim": {"lr": 4e-3}}


@dataclasses.dataclass(frozen=True)
class Proved:
    """A proof that the command line made of a LoRA recipe on a backend of the user's own: DDP."""

    recipe: Path
    output: Path
    done: Finished

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.output / "proof.json").read_text())

    @property
    def reference(self) -> Run:
        return Run(self.output / "runs" / "own" / "reference")

    @property
    def mine(self) -> Run:
        return Run(self.output / "runs" / "own" / "mine")


@pytest.fixture(scope="session")
def proved(tiny: Tiny, finetune: Finetune, tmp_path_factory: pytest.TempPathFactory) -> Proved:
    folder = tmp_path_factory.mktemp("proof")
    recipe = write_recipe(folder / "r.json", tiny.fields(**LORA))
    shutil.copy(backend.find("ddp"), folder / "mine.yaml")
    done = finetune("prove", recipe, "--backends", "mine.yaml", "--output", "proof", cwd=folder)
    return Proved(recipe, folder / "proof", done)


def subject_of(tiny: Tiny, folder: Path, kind: Any = "own", **sections: Any) -> Subject:
    recipe = catalog.from_fields(tiny.fields(**(LORA | sections)))
    return make_subject(of_kind(recipe, kind), SHAPE, folder / "subject", folder / "cache")


@pytest.mark.slow
def test_a_recipe_is_proved_on_a_backend_of_the_users_own(proved):
    """With every step of both runs, of which one is killed before its end and goes on."""
    assert proved.done.status == 0, proved.done.output
    assert proved.record["proved"] is True
    assert sorted((check["name"], check["passed"]) for check in proved.record["checks"]) == [
        ("end to end", True),
        ("equal", True),
        ("packing", True),
        ("realised", True),
        ("resume", True),  # the same bits
        ("resume", True),  # mine on 2, continued by single on 1
        ("resume", True),  # single on 1, continued by mine on 2
    ]
    assert "proved: 7 checks of 1 pairs hold" in proved.done.stdout
    page = (proved.output / "proof.html").read_text()
    assert "mine on 2, continued by single on 1" in page
    assert "http" not in page.replace("http-equiv", "")
    equal = next(check for check in proved.record["checks"] if check["name"] == "equal")
    assert equal["grid"]["columns"][:3] == ["step", "one process", "mine"]
    rows = equal["grid"]["rows"]
    assert [row[0] for row in rows] == list(range(1, 11))
    recorded = list(proved.reference.read_metrics("train"))
    assert [row[1] for row in rows] == [record["loss"] for record in recorded]
    starts = (next(run.read_metrics("start")) for run in (proved.reference, proved.mine))
    assert [start["accumulation"] for start in starts] == [4, 2]
    assert len({record["trained_tokens"] for record in recorded}) > 1  # masks are uneven
    kinds = [json.loads(line)["kind"] for line in killed_of(proved.mine).read_text().splitlines()]
    assert "end" not in kinds
    starts = [record["resumed_from"] for record in proved.mine.read_metrics("start")]
    assert starts == [None, 5]


def killed_of(run: Run) -> Path:
    return Trial(Path(), "mine", 2, "fp32", run).killed_record


@pytest.mark.slow
def test_the_real_model_is_proved_in_the_recipes_own_precision_and_batch(tiny, finetune, tmp_path):
    """ZeRO-1, whose optimizer in bf16 is a class of its own."""
    fields = tiny.fields(**LORA, batch={"rows": 12, "micro_rows": 3})
    recipe = write_recipe(tmp_path / "r.json", fields)
    given = "--full --bf16 --like-mine --backends zero1 --steps 6".split()
    finetune("prove", recipe, *given, "--output", tmp_path / "proof").passed()
    proof = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert [check["name"] for check in proof["checks"] if not check["passed"]] == []
    for name, accumulation in (("reference", 4), ("zero1", 2)):
        begun = next(Run(tmp_path / "proof/runs/own" / name).read_metrics("start"))
        assert begun["accumulation"] == accumulation
        assert (begun["precision"], begun["micro_rows"]) == ("bf16", 3)
    proved = json.loads((tmp_path / "proof/subject/own/recipe.json").read_text())
    assert proved["model"]["name"] == str(tiny.model)


def equality(proved: Proved, run: Run) -> Check:
    return checks.check_equal("own", "mine", proved.reference, run, FP32, range(1, 11))


def test_a_check_reads_every_step_and_the_trained_weights(train: Train, tmp_path: Path) -> None:
    """The same on runs of one process, each changed in one place."""
    run = train("run", **LORA)
    loss, weights = (copy_of(run, tmp_path / name) for name in ("loss", "weights"))
    change(loss, step=6, factor=1 + 1e-4)
    (file,) = (weights.checkpoint(6) / "state").iterdir()
    save_file({k: v * (1.01 if "lora_B" in k else 1) for k, v in load_file(file).items()}, file)
    steps = range(1, 7)
    found = [
        checks.check_equal("own", "ddp", run, each, FP32, steps) for each in (run, loss, weights)
    ]
    assert [check.passed for check in found] == [True, False, False]
    assert found[1].summary.startswith("step 6: loss")
    assert found[2].summary.startswith("trained weights")


@pytest.mark.slow
def test_another_learning_rate_is_not_proved(proved, tmp_path):
    recipe = catalog.override(catalog.load(proved.reference.recipe), ["optim.lr=4.1e-3"])
    other = ft.train(recipe, precision="fp32", options=Options(tmp_path / "other", plot=False))
    check = equality(proved, other)
    assert check.passed is False
    assert "step 2: loss" in check.summary  # step 1 is taken with the same weights
    assert not proof_of(proved, check).proved


def change(run: Run, step: int, factor: float | None) -> None:
    """Multiply a recorded loss, or leave its step out."""
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for record in list(records):
        if record["kind"] == "train" and record["step"] == step:
            if factor is None:
                records.remove(record)
            else:
                record["loss"] *= factor
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def change_state(run: Run, name: str, harm: Callable[[torch.Tensor], object]) -> None:
    for file in (run.checkpoint(10) / "state").iterdir():
        tensors = load_file(file)
        for each in (tensor for key, tensor in tensors.items() if name in key):
            harm(each)
        save_file(tensors, file)


def move(run: Run, elements: int) -> None:
    """Of the 512 elements of lora_A one in a thousand is left out, so one."""
    name = "layers.0.self_attn.q_proj.lora_A.default.weight|weight|0,0"
    change_state(run, name, lambda tensor: tensor.view(-1)[:elements].add_(0.01))


def forget_best(run: Run) -> None:
    path = run.checkpoint(10) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["progress"] |= {"best_step": 5, "stale": 1}
    del manifest["sha256"]
    path.write_text(json.dumps(manifest))


CHANGES: dict[str, tuple[Callable[[Run], None], str | None]] = {
    "a loss": (lambda run: change(run, 7, 1 + 1e-4), "^step 7: loss"),
    "the last bit of a loss": (lambda run: change(run, 6, 1 + 2**-52), None),
    "a missing step": (lambda run: change(run, 8, None), "step 8: loss None"),
    "weights": (lambda run: change_state(run, "lora_B", lambda t: t.mul_(1.01)), "trained weights"),
    "one element moved by rounding": (lambda run: move(run, 1), None),
    "two elements": (lambda run: move(run, 2), "trained weights"),
    "the best evaluation": (forget_best, "best evaluation at step 5 instead of 10"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("harm", "said"), CHANGES.values(), ids=CHANGES.keys())
def test_what_differs_is_found_and_named_unless_rounding_explains_it(proved, tmp_path, harm, said):
    run = copy_of(proved.mine, tmp_path / "mine")
    harm(run)
    check = equality(proved, run)
    assert check.passed is (said is None), check.summary
    assert said is None or re.search(said, check.summary)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "factor"), [(7, 1 + 1e-4), (6, 1 + 2**-52)])
def test_the_last_bit_counts_after_a_resume_on_the_same_backend(proved, tmp_path, step, factor):
    run = copy_of(proved.mine, tmp_path / "mine")
    change(run, step, factor)
    check = checks.check_same_bits("own", "mine", killed_of(run), run, 5)
    assert check.passed is False
    assert check.summary.startswith(f"step {step}: loss")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp_full_shard", "zero3"])
def test_whole_weights_are_not_what_a_sharded_backend_promises(proved, backend):
    recipe = catalog.load(proved.reference.recipe)
    assert checks.check_realised("own", plan(recipe, "ddp", 2), proved.mine).passed is True
    check = checks.check_realised("own", plan(recipe, backend, 2), proved.mine)
    assert check.passed is False
    for what in ("parameters", "gradients", "optimizer"):
        assert f"{what}: [" in check.summary


DAMAGED: dict[str, tuple[Callable[[str, torch.Tensor], torch.Tensor | None], str]] = {
    "missing": (lambda name, t: None if FIRST in name else t, "lora_A.weight is missing"),
    "empty": (lambda name, t: torch.empty(0, 64) if FIRST in name else t, "is empty"),
    "zeros": (lambda name, t: 0 * t if "lora_B" in name else t, "is all zeros: never trained"),
    "other": (lambda name, t: 1.01 * t, "in plain transformers"),
}
FIRST = "layers.0.self_attn.q_proj.lora_A"


@pytest.mark.slow
def test_damaged_results_are_found_and_those_of_a_classifier_are_not_damaged(
    proved, tiny, tmp_path
):
    """All in one process of plain libraries."""
    subject, deliveries = subject_of(tiny, tmp_path), list[Delivery]()
    for damage, (harm, _) in DAMAGED.items():
        run = copy_of(proved.mine, tmp_path / damage)
        file = run.final / "adapter_model.safetensors"
        harmed = {name: harm(name, tensor) for name, tensor in load_file(file).items()}
        kept = {name: tensor for name, tensor in harmed.items() if tensor is not None}
        save_file(kept, file, metadata={"format": "pt"})
        deliveries.append(Delivery("own", damage, subject, run, bf16=False))
    given = {"method": "classifier", "model": {"name": str(tiny.model)}, "labels": ["a", "b"]}
    shape = dataclasses.replace(SHAPE, steps=6)
    made = make_subject(catalog.from_fields(given), shape, tmp_path / "c", tmp_path / "cache")
    run = ft.train(made.recipe, precision="fp32", options=Options(tmp_path / "run", plot=False))
    deliveries.append(Delivery("own", "classifier", made, run, bf16=False))
    found = {check.backend: check for check in check_deliveries(deliveries, FP32)}
    assert {name for name, check in found.items() if check.passed} == {"classifier"}
    for damage, (_, said) in DAMAGED.items():
        assert said in found[damage].summary


def proof_of(proved: Proved, *found: Check) -> Proof:
    """A proof with these checks in place of its own."""
    fields = {field.name: proved.record[field.name] for field in dataclasses.fields(Proof)}
    return Proof(**(fields | {"checks": found, "tolerance": FP32, "refused": ()}))


LACKING = Refused("own", "zero3", "zero3 needs DeepSpeed: pip install deepspeed", missing=True)


def test_a_backend_that_was_named_and_cannot_run_here_is_not_proved():
    checks_of_ddp = (Check("own", "ddp", "equal", True, ""),) * 6
    refused = Refused("own", "zero2", "why", named=True)
    for not_tried, proved_all_the_same, said in (
        (LACKING, True, "; 1 pairs not proved, because zero3 needs DeepSpeed: pip install"),
        (dataclasses.replace(LACKING, named=True), False, "not proved: 0 of 6 checks failed; 1"),
        (refused, True, "; 1 pairs are refused by the plann"),
    ):
        proof = Proof({}, {}, {}, FP32, checks_of_ddp, (not_tried,), {}, seconds=1.0, launches=1)
        assert proof.proved is proved_all_the_same
        assert said in proof.verdict


@pytest.mark.slow
def test_a_machine_without_deepspeed_proves_the_rest_and_ends_with_1(proved, finetune, tmp_path):
    """A machine without it, to this process: what is imported first has no such package."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: (\n"
        "    None if name == 'deepspeed' else find(name, *rest))\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = ["--backends", "zero3,single", "--steps", 6, "--output", tmp_path / "proof"]
    done = finetune("prove", proved.recipe, *words, env=env, cold=True)
    assert done.status == 1, done.output
    told = " ".join(done.stdout.split())  # the terminal's lines are folded
    assert "not possible here: the recipe on zero3: zero3 needs DeepSpeed" in told
    lacking = "zero3 needs DeepSpeed, which is not installed: pip install 'deepspeed>=0.19'"
    assert f"1 pairs not proved, because {lacking}" in told
    assert "not proved: 0 of " in told


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_proof_with_every_process_of_it(tiny, tmp_path, number, status):
    output = tmp_path / "proof"
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**LORA))
    words = ["prove", str(recipe), "--backends", "ddp", "--jobs", "2"]
    process = start([*words, "--output", str(output)], tmp_path, warm=True)
    seen: set[psutil.Process] = set()

    def workers_are_there() -> bool:
        seen.update(family_of(process.pid))
        return sum("train" in words_of(each) for each in seen) >= 2

    wait_for(workers_are_there, process)
    workers_are_there()
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == status, told
    assert told.endswith(f"interrupted by {signal.Signals(number).name}: nothing was proved\n")
    assert "Traceback" not in told
    assert [each for each in psutil.process_iter() if str(output) in " ".join(words_of(each))] == []
    assert [each for each in seen if each.is_running()] == []
    assert not (output / "proof.json").exists()


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
def test_a_recipe_that_cannot_be_trained_is_not_proved(proved, finetune, tmp_path):
    words = "optim.lr=1e30 optim.warmup=0 --backends single --steps 6 --output".split()
    done = finetune("prove", proved.recipe, *words, tmp_path / "p")
    assert done.status == 1, done.output
    assert "Traceback" not in done.output
    assert "not proved: 2 of 2 checks failed" in done.stdout  # packing too
    record = json.loads((tmp_path / "p" / "proof.json").read_text())
    assert record["proved"] is False
    assert record["checks"][0]["passed"] is False


def test_refused_pairs_are_listed_with_the_reason(tiny, tmp_path):
    subject = subject_of(tiny, tmp_path, optim={"name": "adamw_8bit"})
    request = Request(subject.recipe, ("ddp", "zero2"), SHAPE, tmp_path)
    pairs, refused = accepted_pairs(request, {"own": subject})
    assert [pair.where for pair in pairs] == ["ddp on 2"]
    assert [(each.kind, each.backend) for each in refused] == [("own", "zero2")]
    assert "adamw_8bit stores its moments in blocks" in refused[0].reason


def test_every_method_can_be_proved(tiny, tmp_path):
    """With generated data, on a backend of two processes; online methods with their samples."""
    for method in METHODS:
        needed = dict(method_matrix.NEEDED.get(method, {}))
        if "teacher" in needed:
            needed["teacher"] = {"name": str(tiny.model)}
        given = {"method": method, "model": {"name": str(tiny.model)}, **needed}
        place = tmp_path / method
        subject = make_subject(catalog.from_fields(given), SHAPE, place, tmp_path / "cache")
        assert type(subject.recipe) is find_method(method)
        request = Request(subject.recipe, ("ddp",), SHAPE, place)
        pairs, refused = accepted_pairs(request, {"own": subject})
        assert [pair.where for pair in pairs] == ["ddp on 2"], (method, refused)


def test_a_subject_has_the_kind_and_the_batch_that_were_asked_for_and_no_replaced_model(
    tiny, tmp_path
):
    for kind, quantization, adapted in (
        ("own", "none", True), ("lora", "none", True), ("qlora", "nf4", True),
        ("full", "none", False),
    ):  # fmt: skip
        recipe = subject_of(tiny, tmp_path / kind, kind).recipe
        assert (recipe.model.quantization, recipe.adapter is not None) == (quantization, adapted)
    recipe = catalog.from_fields(tiny.fields(batch={"rows": 24, "micro_rows": 3}))
    shape = dataclasses.replace(SHAPE, own_batch=True)
    assert make_subject(recipe, shape, tmp_path / "s", tmp_path / "c").recipe.batch == recipe.batch
    shape = dataclasses.replace(SHAPE, whole=True)
    with pytest.raises(FinetuneError, match="not on this machine; --full proves the real model"):
        make_subject(catalog.resolve("qwen3_0_6b_lora"), shape, tmp_path / "s", tmp_path / "c")


def test_missing_models_and_data_are_replaced_and_reported(tmp_path):
    recipe = catalog.resolve("qwen3_0_6b_lora")
    subject = make_subject(recipe, SHAPE, tmp_path / "subject", tmp_path / "cache")
    config = AutoConfig.from_pretrained(subject.recipe.model.name)
    assert (config.model_type, config.num_hidden_layers) == ("qwen3", 2)
    assert config.tie_word_embeddings
    told = " ".join(subject.notes)
    assert "the tokenizer of Qwen/Qwen3-0.6B is not on this machine" in told
    assert "its published architecture is used" in told
    assert "tatsu-lab/alpaca is not on this machine: rows are generated" in told
    fewest, most = subject.trained_tokens
    assert fewest < most / 10
    assert (subject.recipe.optim, subject.recipe.adapter) == (recipe.optim, recipe.adapter)


def test_weights_of_a_replaced_model_lose_nothing_in_bf16(tmp_path: Path) -> None:
    """ZeRO rounds what it trains to bf16 at the start, and the reference does not."""
    recipe = catalog.resolve("qwen3_0_6b_lora")
    subject = make_subject(recipe, SHAPE, tmp_path / "subject", tmp_path / "cache")
    tensors = load_file(Path(subject.recipe.model.name) / "model.safetensors")
    assert {each.dtype for each in tensors.values()} == {torch.float32}
    assert all(torch.equal(each, each.bfloat16().float()) for each in tensors.values())


@pytest.mark.parametrize(("name", "apart"), [("loss", 0.01), ("grad_norm", 0.02)])
def test_a_hundredth_is_more_than_rounding_to_bf16(name: str, apart: float) -> None:
    alone = {1: {"loss": 6.0, "grad_norm": 2.0}}
    here = {1: alone[1] | {name: alone[1][name] * (1 + apart)}}
    assert checks.compare_steps(alone, alone, range(1, 2), BF16)[0] == []
    assert len(checks.compare_steps(alone, here, range(1, 2), BF16)[0]) == 1


def test_every_architecture_shrinks_to_one_of_its_own(assets):
    for path in sorted((assets / "configs").rglob("*.json")):
        config = AutoConfig.for_model(**json.loads(path.read_text())).to_dict()
        small = AutoConfig.for_model(**shrink(config, 300, 128))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(small)
        assert small.model_type == config["model_type"]
        assert sum(p.numel() for p in model.parameters()) < 600_000, path
        assert small.tie_word_embeddings == config.get("tie_word_embeddings", True), path


def test_a_ring_continues_the_checkpoint_of_every_backend_by_two_others(tiny, tmp_path):
    subject = subject_of(tiny, tmp_path)
    names = named_backends("all", subject.recipe, SHAPE)
    whole = Request(subject.recipe, names, SHAPE, tmp_path, crossings="all")
    pairs, _ = accepted_pairs(whole, {"own": subject})
    names = tuple(pair.backend for pair in pairs)
    ring = crossings_of(dataclasses.replace(whole, crossings="ring"), pairs)
    both = {(each.written.backend, each.continued.backend) for each in ring}
    assert len(both) == 2 * len(names)
    assert Counter(written for written, _ in both) == dict.fromkeys(names, 2)
    assert Counter(continued for _, continued in both) == dict.fromkeys(names, 2)
    assert len(crossings_of(whole, pairs)) == len(names) * (len(names) - 1) // 2


@pytest.mark.slow
def test_a_report_includes_the_proof_of_its_recipe(proved, finetune, tmp_path):
    recipe = catalog.override(catalog.load(proved.recipe), ["max_steps=1"])
    run = ft.train(recipe, precision="fp32", options=Options(tmp_path / "run", plot=False))
    finetune("report", run.root, "--proof", proved.output).passed()
    assert proved.record["verdict"] in run.report.read_text()
    write_json(run.recipe, catalog.to_fields(recipe.with_optim(lr=0.5)))
    said = finetune("report", run.root, "--proof", proved.output).refused()
    assert "a proof of another recipe" in said
    assert "optim.lr: 0.004 -> 0.5" in said


def test_a_mistake_is_reported_before_anything_is_started(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**LORA))
    shutil.copy(backend.find("ddp"), tmp_path)
    for words, said in (
        ("--backends ddpp", "backend 'ddpp': unknown; did you mean 'ddp'?"),
        ("--backends zero9.yaml", "backend zero9.yaml: no such file"),
        ("--backends ddp,ddp.yaml", "are both named 'ddp', and a run is named after its"),
        ("--backends ,", "--backends: got ',', expected comma-separated names, or all"),
        ("--kinds qlorra", "--kinds: got 'qlorra', expected some of"),
        ("--steps 3", "--steps: got 3, expected at least 6"),
        ("--output .", "which no proof wrote; choose another --output"),
    ):
        assert cli.main(["prove", str(recipe), *words.split()]) == 2
        assert said in capsys.readouterr().err
        assert {each.name for each in tmp_path.iterdir()} == {"r.json", "ddp.yaml"}
