"""Store the top-k tokens and log-probabilities of a teacher for each label."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from finetune.cache import cache
from finetune.data.prepare import Prepared, prepare
from finetune.data.rows.collate import collate
from finetune.data.rows.store import single_rows
from finetune.data.rows.teacher_store import ABOUT, IDS, LOGPS, hash_of_rows, label_offsets
from finetune.data.scratch import scratch_for
from finetune.errors import FinetuneError
from finetune.inference.load import base_model
from finetune.kernels.divergence import LEAST
from finetune.methods.losses import labelled
from finetune.models.image_parts import image_inputs
from finetune.models.model import load_chat_of, load_tokenizer
from finetune.models.teacher import as_student, compare_tokenizer, refuse_tokens_without_rows
from finetune.models.vocabulary import rows_needed
from finetune.planner.kernels import TILE_ENTRIES
from finetune.process.progress import counted
from finetune.recipe import Recipe
from finetune.runs.manifest import sha256


def teach(recipe: Recipe, folder: Path, top_k: int = 64) -> int:
    """Write the log-probabilities of a recipe's teacher for its rows; returns the number of labels.

    Args:
        recipe: Distillation recipe with a teacher and data.
        folder: Output folder, which must not exist.
        top_k: Tokens stored per label; training treats all other tokens as one class.

    Raises:
        FinetuneError: there is no teacher, it has another vocabulary, or the folder exists.
    """
    if recipe.taught_by is None:
        raise FinetuneError(f"teacher: the recipe (method {recipe.method}) has no teacher to run")
    if folder.exists():
        raise FinetuneError(f"--output {folder}: already exists; name another folder")
    tokenizer = load_tokenizer(recipe)
    compare_tokenizer(tokenizer, recipe.taught_by)
    chat = load_chat_of(recipe, tokenizer)
    data = prepare(recipe, chat, cache("data"))
    data = data.with_image_inputs(image_inputs(recipe.model, chat.images, alone=True))
    refuse_tokens_without_rows(recipe.taught_by, data)
    given, teacher = recipe.taught_by, base_model(as_student(recipe))
    vocabulary = rows_needed(tokenizer)
    if not 0 < top_k <= vocabulary:
        raise FinetuneError(
            f"--top-k {top_k}: expected 1 to {vocabulary}, the size of the vocabulary"
        )
    temperature = getattr(recipe, "temperature", 1.0)
    offsets = label_offsets(data.train.documents)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_for(folder) as scratch:
        columns = {
            IDS: _mapped(scratch / IDS, np.dtype(np.int32), (int(offsets[-1]), top_k)),
            LOGPS: _mapped(scratch / LOGPS, np.dtype(np.float16), (int(offsets[-1]), top_k + 1)),
        }
        at = 0
        for logps in _logps(teacher, data, vocabulary, temperature):
            best = logps.topk(top_k, -1)
            end = at + len(logps)
            others = logps.scatter(1, best.indices, -math.inf).logsumexp(1, keepdim=True)
            kept = torch.cat([best.values, others], 1).clamp(min=LEAST)
            columns[LOGPS][at:end] = kept.cpu().numpy()
            columns[IDS][at:end] = best.indices.cpu().numpy()
            at = end
        for column in columns.values():
            column.flush()
        about = {
            "teacher": given.name, "revision": given.revision, "quantization": given.quantization,
            "top_k": top_k, "temperature": temperature, "labels": int(offsets[-1]),
            "rows": hash_of_rows(data),
            "files": {name: sha256(scratch / name) for name in columns},
        }  # fmt: skip
        (scratch / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        scratch.rename(folder)
    return int(offsets[-1])


@torch.no_grad()
def _logps(
    teacher: PreTrainedModel, data: Prepared, vocabulary: int, temperature: float
) -> Iterator[torch.Tensor]:
    """Log-probabilities at the labels of all documents, in parts of (labels, vocabulary) fp32.

    The logits of all labels of one document are in memory.
    """
    rows, few = single_rows(data.train.documents), max(1, TILE_ENTRIES // vocabulary)
    rows = dataclasses.replace(rows, image_inputs=data.train.image_inputs)
    for number in counted(range(len(rows)), "teaching", len(rows)):
        batch = collate(rows, np.array([number]), 0, teacher.device)  # a single row has no padding
        places, _ = labelled(batch)
        given = {"input_ids": batch.ids, **batch.images}
        logits = teacher(**given, logits_to_keep=places, use_cache=False).logits[0]
        for part in logits.split(few):
            yield F.log_softmax(part[:, :vocabulary].float() / temperature, -1)


def _mapped(path: Path, kind: np.dtype, shape: tuple[int, int]) -> np.memmap:
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
