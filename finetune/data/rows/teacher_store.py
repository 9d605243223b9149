"""Read stored log-probabilities of a teacher, for each label of prepared rows.

teacher.json     top_k, temperature, the teacher, hashes of the rows and of both other files
ids.npy          (labels, k) int32: the most likely tokens at each label, in document order
logps.npy        (labels, k + 1) fp16: their log-probabilities, and that of all other tokens
"""

import json
from pathlib import Path

import numpy as np

from finetune.data.prepare import Prepared
from finetune.data.rows.store import Documents, TokenColumn
from finetune.errors import reading, refuse
from finetune.recipe import Recipe
from finetune.runs.manifest import sha256

ABOUT, IDS, LOGPS = "teacher.json", "ids.npy", "logps.npy"
CHECKED = 65536
"""Labels whose values are checked at a time."""
TOLERANCE = 1e-2
"""Rounding of a log-probability of 0."""
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


def read(recipe: Recipe, data: Prepared, vocabulary: int) -> dict[str, TokenColumn]:
    """Load the teacher's stored values for a recipe's rows, by the name of the batch column.

    Args:
        recipe: Recipe with `teacher_logps`.
        data: Its prepared rows.
        vocabulary: Number of token ids.

    Raises:
        FinetuneError: the files are missing or damaged, or made for other rows or another
            temperature.
    """
    folder = Path(getattr(recipe, "teacher_logps", None) or "")
    prefix = f"teacher_logps: {folder}"
    with reading(f"{prefix}: cannot be read", AGAIN):
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if not isinstance(about, dict) or not isinstance(about.get("files"), dict):
            raise ValueError(f"{ABOUT} lacks the hashes of the files")
        columns = {
            name: np.load(folder / file, mmap_mode="r")
            for name, file in (("teacher_ids", IDS), ("teacher_logps", LOGPS))
        }
        hashes = {file: sha256(folder / file) for file in (IDS, LOGPS)}
        wrong = [file for file, found in hashes.items() if about["files"].get(file) != found]
    temperature = getattr(recipe, "temperature", 1.0)
    problems = [f"{prefix}: {file} does not match its recorded hash; {AGAIN}" for file in wrong]
    if about.get("rows") != hash_of_rows(data):
        problems.append(
            f"{prefix}: was made for other rows, or other trained tokens, than those of the "
            f"recipe; {AGAIN} and the same data, template and train_on"
        )
    if about.get("temperature") != temperature:
        problems.append(
            f"{prefix}: was made at temperature {about.get('temperature')}, and the recipe has "
            f"{temperature}; set temperature={about.get('temperature')}, or {AGAIN}"
        )
    refuse(problems)
    offsets = label_offsets(data.train.documents)
    problems = _wrong_values(*columns.values(), int(offsets[-1]), vocabulary)
    refuse(f"{prefix}: {each}; {AGAIN}" for each in problems)
    return {name: TokenColumn(values, offsets) for name, values in columns.items()}


def _wrong_values(ids: np.ndarray, logps: np.ndarray, labels: int, vocabulary: int) -> list[str]:
    """What is wrong with values whose hashes are right, as another program may write them."""
    top_k = ids.shape[1] if ids.ndim == 2 else 0
    shapes = ((IDS, ids, "integers", top_k), (LOGPS, logps, "floats", top_k + 1))
    kinds = {"integers": np.integer, "floats": np.floating}
    problems = [
        f"{file} has {each.dtype} {each.shape}, expected {kind} ({labels}, {width or 'k'})"
        for file, each, kind, width in shapes
        if each.shape != (labels, width) or not width or not np.issubdtype(each.dtype, kinds[kind])
    ]
    if problems:
        return problems
    for part in np.array_split(np.arange(labels), max(1, labels // CHECKED)):
        some = slice(part[0], part[-1] + 1)
        if ids[some].min() < 0 or ids[some].max() >= vocabulary:
            return [f"{IDS} has ids beyond the {vocabulary} tokens of the vocabulary"]
        if not (np.isfinite(logps[some]) & (logps[some] <= TOLERANCE)).all():
            return [f"{LOGPS} has log-probabilities that are above 0 or not finite"]
    return []
