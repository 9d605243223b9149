"""Whether rows that are packed together train as rows by themselves do."""

import dataclasses

from finetune.prover.proof import Check
from finetune.recipe import Batch

FIELD = "packing"
"""The field of `batch` that packs rows."""


def check_packing(kind: str, backend: str) -> Check:
    """Packed against unpacked losses and gradients; not available where recipes cannot pack."""
    known = {field.name for field in dataclasses.fields(Batch)}
    absent = f"not available: recipes have no batch.{FIELD}"
    waiting = f"not available: batch.{FIELD} is not compared yet"
    return Check(kind, backend, "packing", None, absent if FIELD not in known else waiting)
