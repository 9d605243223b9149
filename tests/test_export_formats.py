"""Each format of an export is accepted by what loads it, or refused with every reason."""

import base64
import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import written
from peft import LoraConfig, PeftModel
from reference_server import Handler, listening
from safetensors.torch import load_file
from tiny_run import (
    CHATML,
    Trained,
    byte_tokenizer,
    logits,
    lora_run,
    nf4_config,
    plain_model,
    relative,
    sign,
    tiny_llama,
    unreachable,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune import FinetuneError, Run, export, load
from finetune.cli import main as cli
from finetune.exporters import ollama, vllm
from finetune.inference.generate import load_folder
from finetune.runs.run import write_json
from finetune.serving.external import vllm_words

PLAIN = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "bias": "none"}
LORA = ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]

REFUSED = [
    ({"use_dora": True}, "use_dora"),
    ({"bias": "all"}, "bias=all"),
    ({"lora_bias": True}, "lora_bias"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save (lm_head)"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"rank_pattern": {"q_proj": 1024}}, "ranks up to 512, got 1024"),
]


def test_an_adapter_that_vllm_refuses_is_refused():
    assert vllm.problems(PLAIN, LORA) == []
    for fields, told in REFUSED:
        (problem,) = vllm.problems({**PLAIN, **fields}, LORA)
        assert told in problem
    classifier = {**PLAIN, "modules_to_save": ["score"]}  # it serves a trained head
    assert vllm.problems(classifier, [*LORA, "x.score.weight"]) == []


def test_the_command_of_vllm_has_the_smallest_rank_that_fits(tmp_path):
    trained = lora_run(tmp_path, r=9, rank_pattern={"q_proj": 20})
    write_json(trained.run.realised, {"mixed_precision": "no"})
    folder = export(trained.run, tmp_path / "out", format="vllm")
    (own, command) = json.loads((folder / "export.json").read_text())["serve"]
    assert own == "finetune serve ."
    assert command.endswith(
        "--max-lora-rank 32 --lora-modules tuned=. --chat-template chat_template.jinja "
        "--dtype float32"
    )
    assert command in (folder / "README.md").read_text()


def test_every_reason_against_vllm_is_reported_and_nothing_is_written(tmp_path):
    trained = lora_run(tmp_path, use_dora=True, modules_to_save=["lm_head"])
    with pytest.raises(FinetuneError) as caught:
        export(trained.run, tmp_path / "out", format="vllm", gate=unreachable)
    assert len(caught.value.problems) == 2
    assert all("--format merged can be served" in each for each in caught.value.problems)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def test_what_cannot_be_merged_is_refused_before_the_gate(trained, tmp_path):
    checkpoint = trained.run.checkpoint(10)
    LoraConfig(target_modules=["absent"]).save_pretrained(checkpoint / "adapter")
    sign(checkpoint, 10)
    for format in ("merged", "nf4"):
        with pytest.raises(FinetuneError, match="absent"):
            export(trained.run, tmp_path / "out", format=format, gate=unreachable)


def test_an_nf4_export_is_the_merged_model_quantised_by_transformers(tmp_path):
    # bitsandbytes (0.50) repacks weights on some CPUs, and then takes multiples of 64 only.
    run = lora_run(tmp_path, tiny_llama(intermediate_size=128)).run
    folder = export(run, tmp_path / "out", format="nf4", dtype=torch.float32)
    assert any(name.endswith("absmax") for name in load_file(folder / "model.safetensors"))
    merged = export(run, tmp_path / "merged", merge=True)
    wanted = plain_model(merged, quantization_config=nf4_config(torch.float32))
    assert torch.equal(logits(plain_model(folder)), logits(wanted))


def nf4_run(tmp: Path) -> Run:
    run = lora_run(tmp, quantization="nf4").run
    write_json(run.realised, {"mixed_precision": "no"})
    return run


def test_a_merge_into_nf4_is_for_runs_that_trained_on_it(tmp_path):
    with pytest.raises(FinetuneError, match="trained on a base with quantization=none"):
        export(lora_run(tmp_path).run, tmp_path / "out", merge_into="nf4")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return lora_run(tmp_path)


def run_with_rows(tmp: Path) -> Run:
    return with_rows(lora_run(tmp).run, tmp)


def asked_about(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"{number} birds"}


def with_rows(run: Run, tmp: Path) -> Run:
    """Name rows that are on this machine in a run's recipe."""
    said = {"role": "assistant", "content": "blue"}
    rows = [{"messages": [asked_about(n), said]} for n in range(12)]
    named = {"source": str(written(tmp / "rows.jsonl", rows)), "format": "messages"}
    write_json(run.recipe, json.loads(run.recipe.read_text()) | {"eval_data": [named]})
    return run


def own_loss(folder: Path) -> float:
    loaded = load_folder(folder, torch.float32)
    return plain_loss(loaded.model, loaded.tokenizer)


def plain_loss(model: Any, tokenizer: Any) -> float:
    """The mean loss of `blue<|im_end|>` after the first five prompts, by plain transformers."""
    losses = []
    for number in range(5):
        asked = [asked_about(number)]
        start = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompt, answer = (
            torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
            for text in (start, "blue<|im_end|>")
        )
        labels = torch.cat([torch.full_like(prompt, -100), answer], 1)
        with torch.no_grad():
            losses.append(model(torch.cat([prompt, answer], 1), labels=labels).loss.item())
    return sum(losses) / 5


def test_an_export_is_compared_with_the_trained_model_on_rows_of_its_run(tmp_path):
    folder = export(run_with_rows(tmp_path), tmp_path / "out", merge=True, check_rows=5)
    found = json.loads((folder / "export.json").read_text())["check"]
    assert (found["rows"], found["prompts_equal"], found["answers_equal"]) == (5, 5, 5)
    assert found["logits"] < 1e-5
    assert found["kl"] < 1e-5
    assert found["loss"] == pytest.approx(found["trained_loss"], rel=1e-5) == own_loss(folder)
    assert found["offer"] is None
    assert (
        "5 prompts have the same token ids in plain transformers"
        in (folder / "README.md").read_text()
    )


PAIR = {"chosen": "blue", "rejected": "a red house"}


@pytest.mark.parametrize(
    ("method", "format", "row"),
    [
        ("dpo", "preference", PAIR),
        ("grpo", "prompts", {"answer": "blue"}),
        ("kto", "kto", {"completion": [{"role": "assistant", "content": "blue"}], "label": False}),
        ("dpo", "ranked_all", {"responses": ["blue", "red", "a house"], "ranks": [0, 1, 2]}),
    ],
)
def test_the_rows_of_every_method_are_compared(tmp_path, method, format, row):
    """The loss is that of the answer that is wanted."""
    run = run_with_rows(tmp_path)
    messages = format in ("prompts", "kto")
    asked = [[asked_about(n)] if messages else f"{n} birds" for n in range(5)]
    rows = written(tmp_path / "own.jsonl", [{"prompt": each, **row} for each in asked])
    recipe = json.loads(run.recipe.read_text()) | {"method": method}
    for name in ("train_on", "token_weight", "eaft_alpha", "label_smoothing"):
        del recipe[name]
    write_json(run.recipe, recipe | {"eval_data": [{"source": str(rows), "format": format}]})
    found = json.loads((export(run, tmp_path / "out") / "export.json").read_text())["check"]
    assert (found["rows"], found["prompts_equal"], found["answers_equal"]) == (5, 5, 5)
    assert (found["loss"] is None) is (method == "grpo")
    if row is PAIR:
        assert found["loss"] == pytest.approx(found["trained_loss"], rel=1e-5)


def test_a_quantised_run_and_its_merges_have_the_losses_of_plain_libraries(tmp_path):
    """On held-out rows, in the check of the export.

    Expected are PEFT on a base whose weights bitsandbytes quantized and dequantized, and PEFT's
    merge into the base without quantization, both in fp32.
    """
    bitsandbytes = pytest.importorskip("bitsandbytes.functional")
    run = with_rows(nf4_run(tmp_path), tmp_path)
    base, adapter = tmp_path / "base", str(run.checkpoint(10) / "adapter")
    rounded, exact = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    for name, each in rounded.named_modules():
        if isinstance(each, torch.nn.Linear) and name != "lm_head":
            packed = bitsandbytes.quantize_4bit(
                each.weight.data, quant_type="nf4", compress_statistics=True
            )
            each.weight.data = bitsandbytes.dequantize_4bit(*packed)
    quantised: Any = PeftModel.from_pretrained(rounded, adapter)
    merged: Any = PeftModel.from_pretrained(exact, adapter).merge_and_unload()
    tokenizer = AutoTokenizer.from_pretrained(base)
    wanted = {"nf4": plain_loss(quantised, tokenizer), "plain": plain_loss(merged, tokenizer)}
    wanted["closer"] = wanted["nf4"]
    assert abs(wanted["plain"] / wanted["nf4"] - 1) > 1e-3
    for name, how in (("plain", {"merge": True}), ("closer", {"merge_into": "nf4"})):
        folder = export(run, tmp_path / name, check_rows=5, **how)
        found = json.loads((folder / "export.json").read_text())["check"]
        assert found["trained_loss"] == pytest.approx(wanted["nf4"], rel=1e-5)
        assert found["loss"] == pytest.approx(wanted[name], rel=1e-5)
        assert (found["offer"] is None) is (name == "closer")
    found = {
        name: logits(load_folder(tmp_path / name, torch.float32).model)
        for name in ("plain", "closer")
    }
    # Sums in another order: 1e-6 of the largest was measured.
    assert relative(found["closer"], logits(load(run).model)) < 1e-5
    assert relative(found["plain"], logits(load(run).model)) > 1e-2
    card = " ".join((tmp_path / "plain" / "README.md").read_text().split())
    assert "trained on the base in nf4 and is merged into the unquantized base" in card
    assert "`--merge-into nf4` merges it into the weights that it was trained on" in card


def test_an_export_without_the_runs_rows_reports_that_nothing_was_compared(tmp_path):
    run = run_with_rows(tmp_path)
    (tmp_path / "rows.jsonl").unlink()
    folder = export(run, tmp_path / "out")
    told = json.loads((folder / "export.json").read_text())["check"]
    assert told == "the run's data has no readable prompts on this machine"
    assert told in (folder / "README.md").read_text()


def test_files_of_an_export_follow_the_umask(trained, tmp_path):
    for mask, mode in ((0o022, 0o644), (0o027, 0o640)):
        before = os.umask(mask)
        try:
            folder = export(trained.run, tmp_path / str(mask))
        finally:
            os.umask(before)
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {mode}


def test_a_broken_record_is_blamed_and_not_the_target(trained, tmp_path):
    trained.run.metrics.mkdir()
    with pytest.raises(FinetuneError, match=r"metrics.jsonl: Is a directory"):
        export(trained.run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% else %}"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
TRIMMED = CHATML.replace("message['content']", "message['content'] | upper")
DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML
)


@pytest.mark.parametrize("template", [CHATML, LLAMA2])
def test_the_template_for_ollama_renders_what_training_did(template):
    tokenizer = byte_tokenizer(template)
    written = ollama.go_template(tokenizer)
    messages = [
        {"role": role, "content": f"  words\nof {role} {{x}} "}
        for role in ("system", "user", "assistant", "user")
    ]
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ollama.render(written, messages) == wanted
    assert "{{ range .Messages }}" in written


def test_a_template_that_ollama_cannot_express_is_refused():
    for template in (TRIMMED, DEFAULT):
        with pytest.raises(FinetuneError, match="does more than add text around each message"):
            ollama.go_template(byte_tokenizer(template))


def test_a_modelfile_names_every_stop_token_and_the_context():
    text = ollama.modelfile("m.gguf", "T", ["<|end|>", "<|im_end|>"], 128)
    assert text.splitlines() == [
        "FROM ./m.gguf", 'TEMPLATE """T"""', 'PARAMETER stop "<|end|>"',
        'PARAMETER stop "<|im_end|>"', "PARAMETER num_ctx 128", "PARAMETER temperature 0",
    ]  # fmt: skip


def stand_in(folder: Path, name: str) -> dict[str, str]:
    """A program that prints its words and key, in front of PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text('#!/bin/sh\necho "$@" key=$VLLM_API_KEY\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_another_engine_is_started_with_the_flags_of_the_export(tmp_path, finetune):
    trained = lora_run(tmp_path, r=9)
    write_json(trained.run.realised, {"mixed_precision": "no"})
    out = export(trained.run, tmp_path / "out", format="vllm")
    env = stand_in(tmp_path / "bin", "vllm") | {"FINETUNE_API_KEY": "secret"}
    done = finetune("serve", out, "--engine", "vllm", "--name", "mine", "--port", 9000, env=env)
    assert done.stdout.strip() == (
        f"serve {trained.base} --tokenizer {out} --served-model-name mine-base --enable-lora "
        f"--max-lora-rank 16 --lora-modules mine={out} --chat-template {out}/chat_template.jinja "
        "--dtype float32 --host 127.0.0.1 --port 9000 key=secret"
    )
    missing = finetune("serve", out, "--engine", "llama.cpp")
    assert missing.status == 2
    assert "holds 0 GGUF files, expected one" in missing.stderr
    (out / "adapter_config.json").write_text("{broken")
    with pytest.raises(FinetuneError, match=r"adapter_config.json: cannot be read"):
        vllm_words(out, "mine", "127.0.0.1", 9000)


class Hub(Handler):
    """Takes uploads."""

    sent: ClassVar[list[tuple[str, Any]]] = []

    def do_POST(self) -> None:
        lines = [json.loads(line) for line in self.body().decode().splitlines()]
        self.sent.append((self.path, lines if "commit" in self.path else lines[0]))
        url = f"http://{self.headers['Host']}/me/tuned"
        answer: dict[str, Any] = {"url": url, "commitUrl": f"{url}/commit/0"}
        answer |= {"commitOid": "0" * 40, "commitMessage": "m", "hookOutput": ""}
        if "preupload" in self.path:
            files = [file["path"] for file in lines[0]["files"]]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": path, **how} for path in files]}
        self.reply(answer)


@pytest.mark.slow  # a command imports everything
def test_a_push_is_private_and_never_names_a_path_of_this_machine(trained, tmp_path, finetune):
    """The hub's client reads its address when it is imported."""
    words = ["export", trained.run.root, "--push", "me/tuned", "--to"]
    with listening(Hub) as address:
        env = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_x"}
        refused = finetune(*words, tmp_path / "a", env=env)
        assert refused.status == 2
        assert f"adapter_config.json names {trained.base}, a path of this machine" in refused.stderr
        assert Hub.sent == []
        done = finetune(*words, tmp_path / "b", "--base", "their/base", env=env, cold=True)
        assert done.status == 0, done.output
    gone = finetune(*words, tmp_path / "c", "--base", "their/base", env=env, cold=True)
    told = f"error: --push me/tuned: {tmp_path / 'c'} is complete, but could not be uploaded: "
    assert (gone.status, told in gone.stderr, "Traceback" in gone.stderr) == (2, True, False)
    sent = Hub.sent
    assert sent[0][0] == "/api/repos/create"
    # The field of huggingface_hub 1 and its newer name.
    made = sent[0][1]
    assert made.get("private") is True or made.get("visibility") == "private"
    ((_, commit),) = [each for each in sent if "/commit/" in each[0]]
    files = {line["value"]["path"]: line["value"] for line in commit if line["key"] == "file"}
    assert files.keys() == {path.name for path in (tmp_path / "b").iterdir()}
    config = json.loads(base64.b64decode(files["adapter_config.json"]["content"]))
    assert config["base_model_name_or_path"] == "their/base"


@pytest.mark.slow  # as above
def test_a_training_uploads_its_best_checkpoints_and_goes_on_if_it_cannot(
    train, tmp_path, monkeypatch
):
    """A last commit with the weights of the best checkpoint, and nothing left in the run."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr(Hub, "sent", [])
    with listening(Hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        run = train("sent", saving={"every": 3, "push_to": "me/tuned"})
    commits = [lines for path, lines in Hub.sent if "/commit/" in path]
    files = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in commits[-1]
        if line["key"] == "file"
    }
    whole = export(run, tmp_path / "whole", step=run.best_step())
    assert files["model.safetensors"] == (whole / "model.safetensors").read_bytes()
    assert not (run.root / "upload").exists()
    assert list(run.read_metrics("warning")) == []
    alone = train("alone", saving={"every": 3, "push_to": "me/tuned"})  # the hub is gone
    (*_, told) = [each["told"] for each in alone.read_metrics("warning")]
    assert told.startswith(f"saving.push_to: step {alone.best_step()} was not uploaded: error: ")
    assert (alone.root / "final/model.safetensors").is_file()


def test_a_name_that_the_hub_refuses_is_refused_before_anything_is_written(
    trained, tmp_path, capsys
):
    words = ["export", str(trained.run.root), "--to", str(tmp_path / "out"), "--push", "me/a b"]
    assert cli.main([*words, "--require", "loss<=10"]) == 2
    assert "error: --push: got 'me/a b', expected OWNER/NAME: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_bundle_is_the_record_of_a_run_without_weights_and_rows(tmp_path):
    run = run_with_rows(tmp_path)
    words = ["export", str(run.root), "--bundle", str(tmp_path / "run.zip")]
    assert cli.main(words) == 0
    with zipfile.ZipFile(tmp_path / "run.zip") as archive:
        assert archive.namelist() == ["recipe.json"]
        assert archive.read("recipe.json") == run.recipe.read_bytes()
    assert cli.main(words) == 2
