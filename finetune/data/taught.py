"""Read stored log-probabilities of a teacher, for each label of prepared rows.

teacher.json     top_k, temperature, the teacher, hashes of the rows and of both other files
ids.npy          (labels, k) int32: the most likely tokens at each label, in document order
logps.npy        (labels, k + 1) fp16: their log-probabilities, and that of all other tokens
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.prepare import Prepared
from finetune.data.store import Documents, TokenColumn
from finetune.errors import FinetuneError
from finetune.recipe import Recipe
from finetune.runs.manifest import sha256

ABOUT, IDS, LOGPS = "teacher.json", "ids.npy", "logps.npy"
AGAIN = "create it again with finetune teach"


def hash_of_rows(data: Prepared) -> str:
    """A hash of the documents of prepared rows: token ids, trained tokens and lengths."""
    parts = (data.folder / "documents" / n for n in ("ids.bin", "trained.bin", "lengths.npy"))
    return " ".join(sha256(path)[:16] for path in parts)


def label_offsets(documents: Documents) -> np.ndarray:
    """Number of labels before each document, and in total.  # (documents + 1,) int64"""
    counts = [
        np.count_nonzero(documents.document(number)[1][1:]) for number in range(len(documents))
    ]
    documents.release()
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def read(recipe: Recipe, data: Prepared) -> dict[str, TokenColumn]:
    """Load the teacher's stored values for a recipe's rows, by the name of the batch column.

    Raises:
        FinetuneError: the files are missing or damaged, or made for other rows or another
            temperature.
    """
    folder = Path(getattr(recipe, "teacher_logps", None) or "")
    told = f"teacher_logps: {folder}"
    try:
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        columns = {
            name: np.load(folder / file, mmap_mode="r")
            for name, file in (("teacher_ids", IDS), ("teacher_logps", LOGPS))
        }
        hashes = {file: sha256(folder / file) for file in (IDS, LOGPS)}
        wrong = [file for file, found in hashes.items() if about["files"][file] != found]
    except (OSError, ValueError, LookupError, TypeError, EOFError) as error:
        raise FinetuneError(f"{told}: cannot be read ({error}); {AGAIN}") from None
    temperature = getattr(recipe, "temperature", 1.0)
    problems = [f"{told}: {file} does not match its recorded hash; {AGAIN}" for file in wrong]
    if about.get("rows") != hash_of_rows(data):
        problems.append(
            f"{told}: was made for other rows, or other trained tokens, than those of the recipe; "
            f"{AGAIN} and the same data, template and train_on"
        )
    if about.get("temperature") != temperature:
        problems.append(
            f"{told}: was made at temperature {about.get('temperature')}, and the recipe has "
            f"{temperature}; set temperature={about.get('temperature')}, or {AGAIN}"
        )
    if problems:
        raise FinetuneError(*problems)
    offsets = label_offsets(data.train.documents)
    return {name: TokenColumn(values, offsets) for name, values in columns.items()}
