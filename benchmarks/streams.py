"""Processor time of a step on rows of a stream, and how long it waits, against cached rows."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.data import learn_tokenizer, write_rows
from benchmarks.job import Shape
from benchmarks.record import ROOT, Result
from finetune import Batch, Data, Model, catalog
from finetune.methods.sft import SFT
from finetune.runs.run import Run, write_json

ROWS, STEPS, BUFFER, WARM = 12_000, 60, 100, 10
SHAPE = Shape(hidden_size=128, layers=2, rows=8, micro_rows=4, length=512)
HOW = (
    f"A Llama of 1.5 million parameters, 8 rows of GSM8K's length in a step, {STEPS} steps on one "
    f"process with one thread, in turn on cached rows and on a stream with buffers of {BUFFER} "
    "rows. Processor time is that of the process that trains, without the one that prepares rows; "
    "waiting is the `data_seconds` of metrics.jsonl; both are of steps after the tenth, over 1,000 "
    "tokens, as the two orders have rows of other lengths. Medians of the trainings."
)


def measure(folder: Path, runs: int) -> Result:
    """Train `runs` times each way."""
    write_rows(folder / "rows.jsonl", ROWS)
    learn_tokenizer(folder / "rows.jsonl", folder / "tokenizer")
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(runs):
        for stream in (bool(number % 2), not number % 2):
            found[stream].append(_train(folder, stream, number))
            print(f"stream={stream}: {found[stream][-1]}", flush=True)
    median = {
        stream: [statistics.median(each) for each in zip(*pairs, strict=True)]
        for stream, pairs in found.items()
    }
    ratio = sum(median[True]) / sum(median[False])
    values = {
        "cached_seconds": found[False], "streamed_seconds": found[True], "ratio": ratio,
    }  # fmt: skip
    table = [
        ["rows", "processor time of 1,000 tokens", "waiting"],
        *(
            [name, f"{1e3 * median[stream][0]:.1f} ms", f"{1e3 * median[stream][1]:.2f} ms"]
            for name, stream in (("cached", False), ("streamed", True))
        ),
        ["streamed to cached, both times", f"{ratio:.3f}", ""],
    ]
    return Result("Steps on a stream", HOW, values, table, [])


def _train(folder: Path, stream: bool, number: int) -> tuple[float, float]:
    """Processor time and waiting of 1,000 tokens, in seconds."""
    config = SHAPE.config() | {"vocab_size": 8192, "eos_token_id": 0, "pad_token_id": None}
    recipe = SFT(
        Model(config=config, tokenizer=str(folder / "tokenizer"), chat_template="chatml"),
        data=(Data(str(folder / "rows.jsonl"), "question_answer", stream=stream),),
        batch=Batch(SHAPE.rows, SHAPE.micro_rows, SHAPE.length, overlong="truncate"),
        max_steps=STEPS, stream_buffer=BUFFER,
    )  # fmt: skip
    write_json(folder / "recipe.json", catalog.to_fields(recipe))
    run = Run(folder / f"{'streamed' if stream else 'cached'}-{number}")
    words = [sys.executable, "-m", "finetune", "train", str(folder / "recipe.json")]
    words += ["--precision", "fp32", "--no-plot", "--output", str(run.root)]
    env = os.environ | {"FINETUNE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    training = subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    seen = list[tuple[int, float]]()
    while training.poll() is None and (not seen or seen[-1][0] < STEPS - WARM):
        steps = sum(1 for _ in run.read_metrics("train")) if run.metrics.exists() else 0
        if steps >= (STEPS - WARM if seen else WARM):
            times = psutil.Process(training.pid).cpu_times()
            seen.append((steps, times.user + times.system))
        time.sleep(0.02)
    assert training.wait() == 0
    (first, before), (last, after) = seen
    rows = [row for row in run.read_metrics("train") if first < row["step"] <= last]
    tokens = sum(row["real_tokens"] for row in rows) / 1000
    return (after - before) / tokens, sum(row["data_seconds"] for row in rows) / tokens
