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
TALKS = 20_000
"""Number of four-turn conversations for the comparison with the tokenizer alone."""
HOW = (
    "Questions and answers of the length of GSM8K's, no two alike, in one JSON Lines file, through "
    "a byte-level BPE of 8,192 tokens that was learned from them and the built-in `chatml` "
    "template, packed into slots of 1,024 tokens. Timed in a process of its own, from the file to "
    "memory-mapped rows in an empty cache, and once more with the cache filled. Memory is the peak "
    "resident set of that process, and of the largest of the processes that it starts. The last "
    "line encodes conversations of four turns in one process with one thread, and has the "
    "tokenizer alone encode the same texts, by turns: processor time from the parsed row to ids "
    "and trained tokens, against ids."
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
own, others = (
    resource.getrusage(who).ru_maxrss * 1024
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
)
print(json.dumps({"seconds": seconds, "own": own, "others": others, "counts": counts}))
"""


ALONE = """
import json, os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from pathlib import Path
from transformers import AutoTokenizer
from finetune.data.rows.encode import Chunk, Encoder
from finetune.data.chat.render import load_chat
from finetune.methods.sft import SFT
folder = Path(sys.argv[1])
pairs = [json.loads(line) for line in (folder / "rows.jsonl").open(encoding="utf-8")]
talks = [
    [
        {"role": role, "content": pair[column]}
        for pair in (first, second)
        for role, column in (("user", "question"), ("assistant", "answer"))
    ]
    for first, second in zip(pairs[::2], pairs[1::2])
]
chat = load_chat(AutoTokenizer.from_pretrained(folder / "tokenizer"), "chatml")
encoder = Encoder(SFT().with_batch(max_length=4096), chat)
ours = theirs = 0.0
for start in range(0, len(talks), 256):
    rows = [(number, {"messages": talk}) for number, talk in enumerate(talks[start : start + 256])]
    texts = [
        chat.tokenizer.apply_chat_template(
            row["messages"], chat_template=chat.template, tokenize=False
        )
        for _, row in rows
    ]
    begun = time.process_time()
    encoder(Chunk(0, "messages", "rows.jsonl", rows))
    between = time.process_time()
    chat.tokenizer(texts, add_special_tokens=False)
    theirs += time.process_time() - between
    ours += between - begun
print(json.dumps({"rows": len(talks), "encoded": ours, "tokenizer_alone": theirs}))
"""


def measure(folder: Path, rows: int) -> Result:
    """Prepare a file of `rows` rows twice: with an empty cache, and from the cache."""
    size = write_rows(folder / "rows.jsonl", rows)
    learn_tokenizer(folder / "rows.jsonl", folder / "tokenizer")
    first, again = _run(PREPARE, folder), _run(PREPARE, folder)
    few = folder / "few"
    few.mkdir()
    write_rows(few / "rows.jsonl", min(rows, 2 * TALKS))
    learn_tokenizer(few / "rows.jsonl", few / "tokenizer")
    beside = _run(ALONE, few)
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
        "conversations": beside["rows"],
        "encoded_per_tokenizer_alone": beside["encoded"] / beside["tokenizer_alone"],
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
        [
            f"{beside['rows']:,} conversations, against the tokenizer alone",
            f"{values['encoded_per_tokenizer_alone']:.2f}x",
        ],
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
