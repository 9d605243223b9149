"""A GGUF file reads the token ids of training, answers as trained, and stops where training did."""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import llama_server
import pytest
from conftest import written
from llama_run import INSTRUCT, MARKED, furthest, llama_tokenizer, rows, sentences, trained_run
from tiny_run import lora_run, unreachable
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from finetune import Data, FinetuneError, catalog, export, load
from finetune.exporters import gguf, gguf_tokens, ollama
from finetune.exporters.source import open_source

ANSWER = 24
"""Tokens of a compared answer at most."""
TIES = 0.01
"""Between logits of tokens that llama.cpp may swap: its cache of keys and values is in fp16."""


def converted(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """The vocabulary as llama.cpp's converter writes it without a `tokenizer.model`.

    Every token has the same score, only those that a role names are special, and a BOS is added
    where the post-processor does, whatever the configuration says.
    """
    from gguf import GGUFWriter

    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
    special = set(tokenizer.all_special_tokens)
    writer = GGUFWriter(folder / "vocabulary.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types([3 if token in special else 1 for token, _ in tokens])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_add_bos_token(tokenizer("")["input_ids"] == [tokenizer.bos_token_id])
    if "add_prefix_space" in config:
        writer.add_add_space_prefix(config["add_prefix_space"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return folder / "vocabulary.gguf"


def first_alone(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with a space before its first text only, as Llama 2's without `legacy`."""
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    return tokenizer


@pytest.mark.parametrize(
    ("name", "opens"),
    [
        ("made", True),
        ("first alone", False),
        ("stories260K", False),
        pytest.param("mistral-v3", True, marks=pytest.mark.slow),  # the package gguf needs seconds
    ],
)
def test_a_gguf_file_reads_the_ids_of_training(tmp_path, request, name, opens):
    """Special tokens that no role names, spaces after them, and prompts without a BOS."""
    if name in ("made", "first alone"):
        tokenizer: Any = llama_tokenizer(None)
        tokenizer = tokenizer if name == "made" else first_alone(tokenizer)
        marks = "<|ask|>", "<|say|>"
    else:
        folder = request.getfixturevalue("assets") / "tokenizers" / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        marks = ("[INST]", "[/INST]") if name == "mistral-v3" else ("<unk>", "</s>")
    tokenizer.save_pretrained(tmp_path)
    start = "<s>" if opens else marks[0]
    texts = [f"{start}{text} {marks[0]} {text}{marks[1]}{text}" for text in sentences(60)]
    wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found: Any = gguf_tokens.open_reader(converted(tokenizer, tmp_path))
    assert [found.ids(text) for text in texts] != wanted
    gguf_tokens.state_defaults(tmp_path, opens)
    path = converted(tokenizer, tmp_path)
    gguf_tokens.repair(path, tmp_path)
    found = gguf_tokens.open_reader(path)
    assert [found.ids(text) for text in texts] == wanted


def test_scores_merge_in_the_order_of_bpe():
    model = {"vocab": {"a": 0, "b": 1, "ab": 2, "bb": 3, "abb": 4}, "merges": ["b b", ["a", "b"]]}
    assert gguf_tokens.merge_scores({"model": model}) == {3: 0.0, 2: -1.0}


def test_without_a_checkout_the_gguf_error_names_how_to_get_one(tmp_path):
    trained = lora_run(tmp_path)
    with pytest.raises(FinetuneError, match=r"git clone .* https://github.com/ggml-org/llama.cpp"):
        export(trained.run, tmp_path / "out", format="gguf")
    with pytest.raises(FinetuneError, match=r"it has no convert_hf_to_gguf.py"):
        export(trained.run, tmp_path / "out", format="gguf", llama_cpp=tmp_path)
    (tmp_path / gguf.CONVERTER).touch()
    with pytest.raises(FinetuneError, match=r"--gguf-type: got 'q4_k_n'.* did you mean 'q4_k_"):
        export(trained.run, tmp_path / "out", format="gguf", llama_cpp=tmp_path, gguf_type="q4_k_n")
    assert not (tmp_path / "out").exists()


WRITE = "import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'wb').write({})"
CONVERTERS = [
    (
        "import argparse; argparse.ArgumentParser().parse_args()",  # of another version
        "unrecognized arguments: .* --vocab-only",
    ),
    (
        "raise NotImplementedError('BPE pre-tokenizer was not recognized')",
        "NotImplementedError: BPE pre-tokenizer was not recognized",
    ),
    ("pass", "it did not write vocabulary.gguf"),
    (WRITE.format(b""), "the package gguf cannot read"),
    (
        WRITE.format(b"GGUF" + struct.pack("<IQQ", 99, 0, 0)),
        "version 99 which we cannot handle.* --format merged needs no llama.cpp",
    ),
    (WRITE.format(b"GGUF" + struct.pack("<IQQ", 3, 0, 0)), "without a tokenizer"),
]


def test_what_a_checkout_cannot_convert_is_refused_first(tmp_path):
    """A merge would fail on the missing base; neither it nor the gate is reached."""
    trained = lora_run(tmp_path)
    (trained.base / "model.safetensors").unlink()
    checkout, out = tmp_path / "llama.cpp", tmp_path / "out"
    checkout.mkdir()
    for text, told in CONVERTERS:
        (checkout / gguf.CONVERTER).write_text(text)
        with pytest.raises(FinetuneError, match=told):
            export(trained.run, out, format="gguf", llama_cpp=checkout, gate=unreachable)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "llama.cpp", "run"]


def test_a_tokenizer_that_llama_cpp_reads_otherwise_is_refused(tmp_path):
    run, tokenizer = trained_run(tmp_path, MARKED)
    data = written(tmp_path / "rows.jsonl", ({"messages": each} for each in rows()))
    recipe = dataclasses.replace(catalog.load(run.recipe), data=(Data(str(data), "messages"),))
    source = dataclasses.replace(open_source(run, None, None, "5GB"), recipe=recipe)
    source.tokenizer.save_pretrained(tmp_path)
    gguf_tokens.state_defaults(tmp_path, opens=False)
    path = converted(tokenizer, tmp_path)
    gguf_tokens.repair(path, tmp_path)
    gguf.check_ids(source, path)
    path = converted(tokenizer, tmp_path)
    with pytest.raises(
        FinetuneError, match=r"would tokenize differently than training: from token \d+"
    ):
        gguf.check_ids(source, path)


@pytest.mark.slow
@pytest.mark.skipif(llama_server.missing() is not None, reason=str(llama_server.missing()))
@pytest.mark.parametrize("template", [INSTRUCT, MARKED], ids=["text", "special tokens, no BOS"])
def test_llama_cpp_reads_answers_and_stops_as_training_did(tmp_path, template):
    run, tokenizer = trained_run(tmp_path, template)
    checkout = Path(str(llama_server.checkout()))
    out = export(run, tmp_path / "out", format="ollama", gguf_type="f32", llama_cpp=checkout)
    server = llama_server.Server(out / "model-f32.gguf", context=512)
    reader = gguf_tokens.open_reader(out / "model-f32.gguf")
    prompts: list[list[int]] = []
    for turns in rows():
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert server.ids(text.removeprefix("<s>")) == reader.ids(text) == wanted
        text = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert server.ids(server.template(turns[:-1])) == prompts[-1]
        for_ollama = ollama.render(str(ollama.go_template(tokenizer)), turns[:-1])
        assert server.ids(for_ollama) == prompts[-1]
    answers = [server.answer(prompt, ANSWER) for prompt in prompts[:50]]
    model = load(run).model
    for prompt, (said, by_stop) in zip(prompts, answers, strict=False):
        assert furthest(model, prompt, said) < TIES
        assert by_stop == (said[-1] == tokenizer.eos_token_id)
    assert 5 < sum(by_stop for _, by_stop in answers) < 50
    assert 'PARAMETER stop "</s>"' in (out / "Modelfile").read_text()
    for kind in ("q8_0", "q4_k_m"):
        if kind not in gguf.TYPES and not llama_server.has_quantiser():
            continue
        small = export(run, tmp_path / kind, format="gguf", gguf_type=kind, llama_cpp=checkout)
        server = llama_server.Server(small / f"model-{kind}.gguf", context=512)
        assert server.ids(server.template(list(rows())[1][:-1])) == prompts[1]
        assert server.answer(prompts[0], ANSWER)[0]
