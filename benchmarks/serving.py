"""Throughput of `finetune serve` with eight concurrent requests, and time to first token."""

import contextlib
import http.client
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.commands import start
from benchmarks.job import DEEP, texts, written
from benchmarks.record import Result

REQUESTS = 8
TOKENS = 32, 128
"""Lengths of completions: a short answer, and one of a few sentences."""
THREADS = 1
HOW = (
    f"{REQUESTS} greedy completions of {TOKENS[0]} and of {TOKENS[1]} tokens, whose prompts have "
    "100 to 240 tokens, over HTTP: one after another, then all at once. The same requests for one "
    "token measure the prompts, whose processor time batching does not reduce: `after prompts` is "
    "the ratio of the other tokens. The first token is that of one streamed request with a prompt "
    "of 512 tokens, from sending it to its text, against `generate` of plain transformers with "
    "`max_new_tokens=1` on the same ids in this process. A Llama of 35 million parameters with "
    "random weights in fp32, one thread; LoRA has r=16 on every linear layer. In turns; the median "
    "of each. Processor time is that of the server: a shared machine's wall time is not its own."
)


def measure(folder: Path, turns: int) -> Result:
    """Serve a model and an adapter on it, and measure both."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    written(texts(64, 32), folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tokenizer")
    ids = [id for text in texts(64, 32) for id in tokenizer(text)["input_ids"]]
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**DEEP.config()))
    model.eval().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "model")
    adapted.save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    values: dict[str, Any] = {}
    for name, plain in (("model", model), ("adapter", adapted.eval())):
        with serving(folder / name, folder) as (port, process):
            values[name] = race(port, process, plain, ids, turns)
        print(name, json.dumps(values[name]), flush=True)
    columns = [
        "served", "tokens", "one after another", "at once", "ratio", "of processor time",
        "after prompts", "first token", "of plain transformers", "ratio", "of processor time",
    ]  # fmt: skip
    rows = [
        [
            name,
            str(tokens),
            f"{of_length['one_by_one']:.1f} tokens/s",
            f"{of_length['at_once']:.1f} tokens/s",
            f"{of_length['ratio']:.2f}",
            f"{of_length['cpu_ratio']:.2f}",
            f"{of_length['after_prompts_cpu_ratio']:.2f}",
            f"{1e3 * found['first_token_seconds']:.0f} ms",
            f"{1e3 * found['plain_first_token_seconds']:.0f} ms",
            f"{found['first_token_ratio']:.2f}",
            f"{found['first_token_cpu_ratio']:.2f}",
        ]
        for name, found in values.items()
        for tokens, of_length in found["completions"].items()
    ]
    return Result("Serving", HOW, values, [columns, *rows], [])


@contextlib.contextmanager
def serving(model: Path, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """A server of a model; yields its port and its process."""
    log = folder / f"{model.name}.log"
    words = ["finetune", "serve", str(model), "--port", "0", "--rows", str(REQUESTS)]
    process = start(words, log, folder / "cache", THREADS)
    try:
        while " at http" not in log.read_text():
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-2_000:])
            time.sleep(0.2)
        url = log.read_text().split(" at http://")[1].split("/v1")[0]
        yield int(url.rpartition(":")[2]), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def race(
    port: int, process: psutil.Process, plain: Any, ids: list[int], turns: int
) -> dict[str, Any]:
    prompts = [ids[1_000 * n :][: 100 + 20 * n] for n in range(REQUESTS)]
    taken: dict[str, list[float]] = {}

    def keep(name: str, value: float) -> None:
        taken.setdefault(name, []).append(value)

    with ThreadPoolExecutor(REQUESTS) as pool:
        for turn in range(turns + 1):  # the first warms up
            for tokens, workers in itertools.product(TOKENS, (1, REQUESTS)):
                ask = pool.map if workers > 1 else map
                begun, cpu = time.perf_counter(), _cpu(process)
                done = sum(ask(lambda prompt, most=tokens: _complete(port, prompt, most), prompts))
                if turn:
                    keep(f"{tokens}/{workers}", done / (time.perf_counter() - begun))
                    keep(f"{tokens}/{workers}/cpu", _cpu(process) - cpu)
            cpu = _cpu(process)
            for prompt in prompts:
                _complete(port, prompt, 1)
            if turn:
                keep("prompts_cpu", _cpu(process) - cpu)
            for _ in range(2):
                cpu = _cpu(process)
                first, spent = _first_token(port, ids[:512]), _cpu(process) - cpu
                theirs, plainly = _plain_first_token(plain, ids[:512])
                if turn:
                    keep("first", first)
                    keep("first_cpu", spent)
                    keep("plain_first", theirs)
                    keep("plain_first_cpu", plainly)
    middle = {name: sorted(each)[len(each) // 2] for name, each in taken.items()}
    return {
        "completions": {tokens: compared(middle, tokens) for tokens in TOKENS},
        "prompts_cpu_seconds": middle["prompts_cpu"],
        "first_token_seconds": middle["first"],
        "plain_first_token_seconds": middle["plain_first"],
        "first_token_ratio": middle["first"] / middle["plain_first"],
        "first_token_cpu_ratio": middle["first_cpu"] / middle["plain_first_cpu"],
    }


def compared(middle: dict[str, float], tokens: int) -> dict[str, float]:
    """Completions of a length: tokens per second, one after another and at once, and ratios."""
    alone, at_once = f"{tokens}/1", f"{tokens}/{REQUESTS}"
    cpu, shared_cpu = middle[f"{alone}/cpu"], middle[f"{at_once}/cpu"]
    prompts = middle["prompts_cpu"]
    return {
        "one_by_one": middle[alone],
        "at_once": middle[at_once],
        "ratio": middle[at_once] / middle[alone],
        "one_by_one_cpu_seconds": cpu,
        "at_once_cpu_seconds": shared_cpu,
        "cpu_ratio": cpu / shared_cpu,
        "after_prompts_cpu_ratio": (cpu - prompts) / (shared_cpu - prompts),
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _send(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def _complete(port: int, prompt: list[int], tokens: int) -> int:
    """Number of generated tokens, at most `tokens`."""
    reply = json.loads(_send(port, {"prompt": prompt, "max_tokens": tokens}).read())
    return int(reply["usage"]["completion_tokens"])


def _first_token(port: int, prompt: list[int]) -> float:
    """Seconds from sending a request to the first text of the answer."""
    begun = time.perf_counter()
    reply = _send(port, {"prompt": prompt, "max_tokens": 1, "stream": True})
    while line := reply.readline():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
            seconds = time.perf_counter() - begun
            reply.read()
            return seconds
    raise RuntimeError("the answer has no text")


def _plain_first_token(model: Any, prompt: list[int]) -> tuple[float, float]:
    """Wall and processor seconds of one token by plain transformers."""
    config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=None, pad_token_id=0)
    begun, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        model.generate(input_ids=torch.tensor([prompt]), generation_config=config)
    return time.perf_counter() - begun, time.process_time() - cpu
