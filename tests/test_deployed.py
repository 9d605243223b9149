"""What is deployed answers as what was trained: 50 rows, greedily, by every way to the model."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import llama_server
import pytest
import torch
from conftest import end_tree, start, wait_for
from llama_run import furthest, rows, trained_run
from peft import PeftModel
from served import running
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune import Run, export, generate, load
from finetune.data.chat.render import load_chat
from finetune.data.samples import Conversation
from finetune.inference.chat import stream
from finetune.launchers.accelerate import free_port
from finetune.runs.run import write_json

ROWS = 50
TOKENS = 8
TIES = 1e-3
"""Between logits of tokens that llama.cpp may swap, relative to the largest: F16 has 11 bits."""

Conversations = list[list[dict[str, str]]]


def asked() -> Conversations:
    """Conversations of one and of several turns, which end with a question."""
    return [turns[:-1] for turns, _ in zip(rows(), range(ROWS), strict=False)]


def plain_answers(model: Any, folder: Path, conversations: Conversations) -> list[str]:
    """Answers of plain transformers with what an export holds."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    texts = [
        tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True)
        for each in conversations
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)
    return texts_of(tokenizer, ids[:, batch["input_ids"].shape[1] :])


def texts_of(tokenizer: Any, answers: Sequence[Sequence[int]]) -> list[str]:
    return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


def served_answers(run: Run, conversations: Conversations, folder: Path) -> list[str]:
    """Answers of `finetune serve`, several requests at once."""
    with running(folder, str(run.root)) as (url, _), ThreadPoolExecutor(8) as pool:

        def ask(messages: list[dict[str, str]]) -> str:
            body = {"messages": messages, "max_tokens": TOKENS}
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
            return reply.json()["choices"][0]["message"]["content"].strip()

        return list(pool.map(ask, conversations))


@pytest.mark.slow
def test_chat_server_adapter_and_merged_model_give_equal_answers(tmp_path):
    run, _ = trained_run(tmp_path)
    conversations = asked()
    loaded = load(run)
    wanted = [text.strip() for text in generate(loaded, conversations, TOKENS)]
    assert len(set(wanted)) > ROWS / 2
    typed = [stream(loaded, each, lambda text: None, TOKENS).strip() for each in conversations]
    assert typed == wanted
    adapter = export(run, tmp_path / "adapter", check_rows=0)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = PeftModel.from_pretrained(base, str(adapter))
    assert plain_answers(model, adapter, conversations) == wanted
    merged = export(run, tmp_path / "merged", merge=True, check_rows=0)
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert plain_answers(model, merged, conversations) == wanted
    assert served_answers(run, conversations, tmp_path) == wanted


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def why_not() -> str | None:
    """Why llama.cpp's server cannot be started here; None where it can."""
    if llama_server.checkout() is None:
        return "LLAMA_CPP_DIR names no checkout of llama.cpp"
    return None if shutil.which("llama-server") else "llama-server is not on PATH"


@contextlib.contextmanager
def engine(name: str, folder: Path, seconds: float, *words: str, **env: str) -> Iterator[str]:
    """`finetune serve --engine NAME` of a folder, at this URL."""
    port = free_port()
    words = ("serve", str(folder), "--engine", name, "--port", str(port), *words)
    process = start(list(words), folder.parent, PATH=os.environ["PATH"], **env)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_up(url), process, seconds)
        yield url
    finally:
        end_tree(process.pid)
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_llama_cpp_answers_as_the_trained_model_does(tmp_path):
    """`finetune serve --engine llama.cpp` with an F16 file; other answers begin at a tie."""
    run, tokenizer = trained_run(tmp_path)
    checkout = Path(str(llama_server.checkout()))
    folder = export(run, tmp_path / "f16", format="gguf", gguf_type="f16", llama_cpp=checkout)
    with engine("llama.cpp", folder, 60) as url:
        client = llama_server.Client(url)
        chat, model = load_chat(tokenizer, None), load(run).model
        for messages in asked():
            prompt = chat.prompt(Conversation(tuple(messages)))
            assert client.ids(client.template(messages)) == prompt
            said, by_stop = client.answer(prompt, TOKENS)
            assert by_stop == (said[-1] == tokenizer.eos_token_id)
            assert furthest(model, prompt, said) < TIES
            text, _ = client.chat(messages, TOKENS)
            whole = texts_of(tokenizer, [said])[0]
            assert text.strip() == whole or "\ufffd" in whole  # each shows broken bytes its way


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("vllm") is None, reason="vllm is not on PATH")
@pytest.mark.parametrize("format", ["vllm", "merged"])
def test_vllm_reads_and_answers_as_the_trained_model_does(tmp_path, format):
    """`finetune serve --engine vllm`, which has attention on CPUs for heads of 32."""
    run, tokenizer = trained_run(tmp_path, num_attention_heads=2)
    write_json(run.realised, {"mixed_precision": "no"})
    folder = export(run, tmp_path / "out", format=format, check_rows=0)
    chat, conversations = load_chat(tokenizer, None), asked()
    wanted = [text.strip() for text in generate(load(run), conversations, TOKENS)]
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with engine("vllm", folder, 300, "--name", "tuned", VLLM_LOGGING_LEVEL="WARNING", **cpu) as url:
        for messages, text in zip(conversations, wanted, strict=True):
            body = {"model": "tuned", "messages": messages, "max_tokens": TOKENS}
            body |= {"temperature": 0, "return_token_ids": True}
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
            assert reply["prompt_token_ids"] == chat.prompt(Conversation(tuple(messages)))
            said = texts_of(tokenizer, [reply["choices"][0]["token_ids"]])[0]
            assert said == text
