"""Greedy answers of a fine-tuned model by every way to deploy it, on held-out prompts.

vLLM and llama.cpp are run if `vllm` and `llama-server` are on PATH; llama.cpp also needs
LLAMA_CPP_DIR, a checkout with the converter.
"""

import contextlib
import json
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.commands import finetune
from benchmarks.record import ROOT, Result
from finetune.data.chat.chat_templates import TEMPLATES
from finetune.data.chat.render import load_chat
from finetune.data.samples import Conversation
from finetune.inference.chat import stream
from finetune.inference.generate import Loaded, load, prompt_ids
from finetune.quickstart.supervised import write_data
from finetune.quickstart.tokenizer import END, PAD, START
from finetune.runs.run import Run

ROWS, TOKENS = 50, 48
HEAD = 32
"""Size of a head: vLLM has no attention on CPUs for the quickstart's heads of 16."""
BASE_STEPS, EPOCHS = 1250, 5
STARTING = 600.0
"""Seconds for a server to start, on a shared machine."""
PORTS = range(20_000, 30_000)
"""Ports that systems do not give to clients: vLLM binds its own after a minute."""
HOW = (
    f"Greedy answers of up to {TOKENS} tokens to {ROWS} held-out orders of the quickstart, in "
    f"fp32. Its base is trained for {BASE_STEPS} steps, with heads of {HEAD} and a tokenizer like "
    f"that of Llama 2, which llama.cpp can read; LoRA then trains {EPOCHS} epochs. The reference "
    "is plain transformers with PEFT. The ids of a prompt, as the program renders the messages, "
    "are compared with those of training."
)
Messages = list[dict[str, str]]
Answer = tuple[str, list[int] | int]
"""The text of an answer, with the ids of its prompt, or only their number."""


def measure(folder: Path) -> Result:
    """Train, export, and query every program."""
    folder.mkdir(parents=True, exist_ok=True)
    return compare(trained(folder), folder)


def compare(run: Run, folder: Path) -> Result:
    """Query every program that is installed, and count equal answers and prompts."""
    lines = (folder / "quickstart/data/held_out.jsonl").read_text().splitlines()[:ROWS]
    asked: list[Messages] = [json.loads(line)["messages"][:-1] for line in lines]
    loaded = load(run)
    chat = load_chat(loaded.tokenizer, None)
    ids = [list(chat.prompt(Conversation(tuple(messages)))) for messages in asked]
    adapter, merged, cache = folder / "adapter", folder / "merged", folder / "cache"
    finetune("export", run.root, "--to", adapter, "--format", "vllm", cache=cache)
    finetune("export", run.root, "--to", merged, "--merge", cache=cache)
    rows: dict[str, tuple[str, list[Answer]]] = {}
    base = AutoModelForCausalLM.from_pretrained(folder / "base/final")
    ours = f"this package, {version('transformers')}"
    rows["transformers and PEFT, adapter"] = (
        f"{version('transformers')}, {version('peft')}",
        plain(PeftModel.from_pretrained(base, str(adapter)), adapter, asked),
    )
    rows["transformers, merged"] = (
        version("transformers"),
        plain(AutoModelForCausalLM.from_pretrained(merged), merged, asked),
    )
    rows["`finetune chat`"] = ours, chatted(loaded, asked)
    words = [sys.executable, "-m", "finetune", "serve"]
    with server([*words, str(run.root), "--name", "tuned"], folder, folder) as url:
        rows["`finetune serve`"] = ours, served(url, asked)
    remarks: list[str] = []
    if shutil.which("vllm"):
        (*_, printed) = json.loads((adapter / "export.json").read_text())["serve"]
        printed = shlex.split(printed.replace(" BASE ", f" {folder / 'base/final'} "))
        for name, command in (
            ("vLLM, adapter, by the printed command", printed),
            ("`finetune serve --engine vllm`, merged",
             [*words, str(merged), "--name", "tuned", "--engine", "vllm"]),
        ):  # fmt: skip
            with server(command, adapter, folder) as url:
                number = httpx.get(f"{url}/version").json()["version"]
                rows[name] = number, served(url, asked)
    else:
        remarks.append("vLLM was not run: vllm is not on PATH")
    if shutil.which("llama-server") and os.environ.get("LLAMA_CPP_DIR"):
        gguf = folder / "gguf"
        finetune(
            "export", run.root, "--to", gguf, "--format", "gguf", "--gguf-type", "f16", cache=cache
        )
        with server(
            [*words, str(gguf), "--name", "tuned", "--engine", "llama.cpp"], folder, folder
        ) as url:
            rows["`finetune serve --engine llama.cpp`, F16"] = (
                llama_version(), served(url, asked, templates=True)
            )  # fmt: skip
    else:
        remarks.append("llama.cpp was not run: LLAMA_CPP_DIR or llama-server on PATH is missing")
    return result(rows, ids, remarks)


def result(
    rows: dict[str, tuple[str, list[Answer]]], ids: list[list[int]], remarks: list[str]
) -> Result:
    wanted = [text for text, _ in next(iter(rows.values()))[1]]
    values, table = dict[str, Any](), [["program", "version", "equal answers", "prompts"]]
    for name, (number, answers) in rows.items():
        equal = sum(text == other for (text, _), other in zip(answers, wanted, strict=True))
        lengths = isinstance(answers[0][1], int)
        same = sum(
            given == (len(own) if lengths else own)
            for (_, given), own in zip(answers, ids, strict=True)
        )
        values[name] = {"version": number, "equal_answers": equal, "equal_prompts": same}
        kind = "equal lengths" if lengths else "equal ids"
        table.append([name, number, f"{equal} of {ROWS}", f"{same} of {ROWS}, {kind}"])
    right = f"{len(set(wanted))} of the {ROWS} answers are different from one another"
    return Result("Equal answers", HOW, values, table, [right, *remarks])


# --- programs ------------------------------------------------------------------------------------


def plain(model: Any, folder: Path, asked: Sequence[Messages]) -> list[Answer]:
    """Answers of plain transformers, with the tokenizer of an export."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    answers: list[Answer] = []
    for messages in asked:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            said = model.generate(
                input_ids=torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False
            )
        text = tokenizer.decode(said[0, len(ids) :], skip_special_tokens=True)
        answers.append((text.strip(), ids))
    return answers


def chatted(loaded: Loaded, asked: Sequence[Messages]) -> list[Answer]:
    answers: list[Answer] = []
    for messages in asked:
        text = stream(loaded, messages, lambda text: None, TOKENS)
        answers.append((text.strip(), prompt_ids(loaded, messages)))
    return answers


def served(url: str, asked: Sequence[Messages], templates: bool = False) -> list[Answer]:
    """Answers of a server with OpenAI's API, eight requests at once.

    Args:
        url: root of the server.
        asked: conversations.
        templates: render and tokenize prompts by the routes of llama.cpp.
    """

    def post(path: str, **body: Any) -> Any:
        reply = httpx.post(f"{url}/{path}", json=body, timeout=STARTING)
        reply.raise_for_status()
        return reply.json()

    def ask(messages: Messages) -> Answer:
        body: dict[str, Any] = {"model": "tuned", "messages": messages, "max_tokens": TOKENS,
                                "temperature": 0}  # fmt: skip
        if is_vllm:
            body["return_token_ids"] = True
        reply = post("v1/chat/completions", **body)
        ids = reply.get("prompt_token_ids") or reply["usage"]["prompt_tokens"]
        if templates:
            text = post("apply-template", messages=messages)["prompt"]
            ids = post("tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        return reply["choices"][0]["message"]["content"].strip(), ids

    is_vllm = httpx.get(f"{url}/version").status_code == 200
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, asked))


@contextlib.contextmanager
def server(words: list[str], folder: Path, logs: Path) -> Iterator[str]:
    """A server that runs in a folder; yields its URL after it has started."""
    port = next(filter(_is_free, random.sample(PORTS, 100)))
    log = logs / f"server-{port}.log"
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(ROOT)}  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, "--port", str(port)], cwd=folder, env=os.environ | settings,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTING
    try:
        while not _is_up(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(log.read_text(errors="replace")[-2_000:])
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_free(port: int) -> bool:
    with socket.socket() as taken:
        return taken.connect_ex(("127.0.0.1", port)) != 0


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def llama_version() -> str:
    done = subprocess.run(
        ["llama-server", "--version"], capture_output=True, text=True, check=False
    )
    found = [each for each in (done.stdout + done.stderr).splitlines() if "version" in each]
    return found[0].removeprefix("version:").strip() if found else "unknown"


# --- the model -----------------------------------------------------------------------------------


def trained(folder: Path) -> Run:
    """A LoRA run of the quickstart's task, whose model every program can serve."""
    data = folder / "quickstart"
    write_data(data)
    llama_tokenizer(data / "data" / "corpus.jsonl", data / "data" / "train.jsonl").save_pretrained(
        folder / "tokenizer"
    )
    heads = 128 // HEAD
    shape = [
        f"model.config.num_attention_heads={heads}",
        f"model.config.num_key_value_heads={heads}",
    ]
    cache, base, run = folder / "cache", folder / "base", folder / "run"
    finetune(
        "train", "quickstart_base", "--precision", "fp32", "--output", base, *shape,
        f"model.tokenizer={folder / 'tokenizer'}", f"max_steps={BASE_STEPS}",
        f"data.0.source={data / 'data' / 'corpus.jsonl'}", cache=cache,
    )  # fmt: skip
    finetune(
        "train", "quickstart", "--precision", "fp32", "--output", run,
        "model.quantization=none", f"epochs={EPOCHS}",
        f"model.name={base / 'final'}", f"data.0.source={data / 'data' / 'train.jsonl'}",
        f"eval_data.0.source={data / 'data' / 'held_out.jsonl'}", cache=cache,
    )  # fmt: skip
    return Run(run)


def llama_tokenizer(*files: Path) -> PreTrainedTokenizerFast:
    """BPE over characters with bytes for unknown ones, as Llama 2's, with a ChatML template."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    texts = [line for file in files for line in file.read_text().splitlines()[:8_000]]
    values = [json.loads(text) for text in texts]
    said = [v.get("text") or " ".join(m["content"] for m in v["messages"]) for v in values]
    special = ["<unk>", PAD, END, START]
    plain = 1536 - len(special) - 256
    learned.train_from_iterator(said, trainers.BpeTrainer(vocab_size=plain, show_progress=False))
    state = json.loads(learned.to_str())
    words = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    listed = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [tuple(each) for each in state["model"]["merges"]]
    whole = Tokenizer(
        models.BPE(
            {word: id for id, word in enumerate(listed)}, merges, unk_token="<unk>",
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    whole.normalizer = learned.normalizer
    whole.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    fast = PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="<unk>", pad_token=PAD, eos_token=END,
        additional_special_tokens=[START], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    return fast
