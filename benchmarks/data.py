"""Speed and memory of data preparation, on a generated file with rows of GSM8K's length."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, Result
from finetune.runs import units

ROWS = 1_000_000
HOW = (
    "Questions and answers of the length of GSM8K's, no two alike, in one JSON Lines file, through "
    "a byte-level BPE of 8,192 tokens that was learned from them and the built-in `chatml` "
    "template, packed into slots of 1,024 tokens. Timed in a process of its own, from the file to "
    "memory-mapped rows in an empty cache, and once more with the cache filled. Memory is the peak "
    "resident set of that process, and of the largest of the processes that it starts. The last "
    "lines compare the processor time of all processes, start included, with `datasets.map` on "
    "as many processes: the template and the tokenizer in batches, to ids alone, and with labels, "
    "for which the prompt is tokenized too."
)
PREPARE = """
import json, resource, sys, time
from pathlib import Path
from transformers import AutoTokenizer
from finetune.data.prepare import prepare
from finetune.data.chat.render import load_chat
from finetune.methods.sft import SFT
from finetune.recipe import Data
folder = Path(sys.argv[1])
recipe = SFT().with_data(Data(str(folder / "rows.jsonl"), "question_answer"))
recipe = recipe.with_batch(max_length=1024, packing=True)
chat = load_chat(AutoTokenizer.from_pretrained(folder / "tokenizer"), "chatml")
begun = time.perf_counter()
counts = prepare(recipe, chat, folder / "cache").counts["train"]
seconds = time.perf_counter() - begun
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
own, others = (each.ru_maxrss * 1024 for each in used)
processor = sum(each.ru_utime + each.ru_stime for each in used)
found = {"seconds": seconds, "own": own, "others": others, "processor": processor}
print(json.dumps(found | {"counts": counts}))
"""


MAPPED = """
import json, os, resource, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from pathlib import Path
import datasets
from transformers import AutoTokenizer
from finetune.data.chat.render import load_chat
from finetune.runs.limits import usable_cores
datasets.disable_progress_bars()
folder = Path(sys.argv[1])
chat = load_chat(AutoTokenizer.from_pretrained(folder / "tokenizer"), "chatml")
tokenizer = chat.tokenizer
tokenizer.chat_template = chat.template
def ids(talks, **options):
    texts = [tokenizer.apply_chat_template(t, tokenize=False, **options) for t in talks]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
def encode(rows):
    talks = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
        for q, a in zip(rows["question"], rows["answer"])
    ]
    whole = ids(talks)
    if not LABELS:
        return {"input_ids": whole}
    asked = map(len, ids([talk[:1] for talk in talks], add_generation_prompt=True))
    labels = [[-100] * n + row[n:] for n, row in zip(asked, whole)]
    return {"input_ids": whole, "labels": labels}
where = {"data_files": str(folder / "rows.jsonl"), "cache_dir": str(folder / f"theirs{LABELS}")}
rows = datasets.load_dataset("json", split="train", **where)
rows.map(encode, batched=True, num_proc=usable_cores(), remove_columns=rows.column_names)
used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"processor": sum(each.ru_utime + each.ru_stime for each in used)}))
"""


def measure(folder: Path, rows: int) -> Result:
    """Prepare a file of `rows` rows twice: with an empty cache, and from the cache."""
    size = write_rows(folder / "rows.jsonl", rows)
    learn_tokenizer(folder / "rows.jsonl", folder / "tokenizer")
    first, again = _run(PREPARE, folder), _run(PREPARE, folder)
    mapped = {
        name: _run(f"LABELS = {labels}\n{MAPPED}", folder)["processor"]
        for name, labels in (("ids", False), ("ids and labels", True))
    }
    counts = first["counts"]
    values = {
        "rows": rows,
        "file_bytes": size,
        "tokens": counts["tokens"],
        "mean_tokens": counts["mean_length"],
        "seconds": first["seconds"],
        "rows_per_second": rows / first["seconds"],
        "tokens_per_second": counts["tokens"] / first["seconds"],
        "seconds_from_cache": again["seconds"],
        "peak_bytes": first["own"],
        "peak_bytes_of_a_child": first["others"],
        "slots_filled": counts["filled"],
        "processor_seconds": first["processor"],
        "processor_seconds_of_map": mapped,
    }
    print(f"{rows:,} rows: {values['rows_per_second']:,.0f} rows/s", flush=True)
    table = [
        ["", "measured"],
        ["rows", f"{rows:,} ({units.size(size)}, {counts['mean_length']:.0f} tokens each)"],
        ["from the file", f"{first['seconds']:.1f} s, {values['rows_per_second']:,.0f} rows/s"],
        ["from the cache", f"{again['seconds']:.2f} s"],
        ["peak memory", units.size(first["own"])],
        ["peak memory of the largest child", units.size(first["others"])],
        ["share of slots filled", f"{counts['filled']:.2%}"],
        *(
            [f"processor time, `datasets.map` to {name} = 1", f"{first['processor'] / each:.2f}"]
            for name, each in mapped.items()
        ),
    ]
    return Result("Preparing data", HOW, values, table, [])


def _run(code: str, folder: Path) -> dict[str, Any]:
    """Run code in a separate process; returns the JSON value of its last output line."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def write_rows(path: Path, rows: int) -> int:
    """Write the file; returns its size in bytes."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucm", k=rng.randint(2, 9))) for _ in range(4000)]
    begun = time.perf_counter()
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            question = " ".join(rng.choices(words, k=rng.randint(25, 65)))
            answer = " ".join(rng.choices(words, k=rng.randint(25, 85)))
            row = {"question": f"{number}: {question}?", "answer": f"{answer} #### {number}"}
            file.write(json.dumps(row) + "\n")
    print(f"wrote {rows:,} rows in {time.perf_counter() - begun:.0f} s", flush=True)
    return path.stat().st_size


def learn_tokenizer(path: Path, folder: Path) -> None:
    """Train a byte-level BPE on the first rows of a file, with the tokens of ChatML."""
    from itertools import islice

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with path.open(encoding="utf-8") as file:
        tokenizer.train_from_iterator(islice(file, 2000), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    wrapped.save_pretrained(folder)
