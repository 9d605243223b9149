"""Run recurrences, short convolutions and LongRoPE once per document.

A recurrent layer passes a state from token to token, and plain transformers passes it into the next
document if documents are concatenated. Here the layer gets documents as the rows of a batch. It is
causal, so padding on the right of a shorter row affects no token.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from finetune.kernels.mixin import mix_in
from finetune.planner.families import family_of
from finetune.planner.padding import rope_types

BOUNDARIES = (
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "document_ends",
    "document_tokens", "token_places",
)  # fmt: skip
"""Arguments of a forward pass with document boundaries, by their names in transformers."""


@dataclasses.dataclass
class SharedBoundaries:
    """Document boundaries of a model's last forward pass, shared by all of its layers."""

    given: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Arguments of flash attention, by their names in transformers; empty for padded rows."""
    ends: Sequence[int] | None = None
    """0 and the end of each document; None for padded rows."""


def separate_documents(model: PreTrainedModel) -> None:
    """Make each recurrent layer of a model run once per document.

    Classes are replaced by subclasses of the same name, as `kernels.head.give_loss` does. Call that
    first: boundaries are recorded when the complete model is called.
    """
    family = family_of(model.config.get_text_config().model_type)
    boundaries = SharedBoundaries()
    wanted: dict[str, type] = dict.fromkeys(family.recurrent, PerDocument)
    wanted |= dict.fromkeys(family.forgetful, WithBoundaries)
    if "longrope" in rope_types(model.config.get_text_config().to_dict()):
        rotary = {type(each).__name__ for each in model.modules()}
        wanted |= dict.fromkeys(
            (name for name in rotary if name.endswith("RotaryEmbedding")), PositionsPerDocument
        )
    for module in model.modules():
        if type(module).__name__ in wanted:
            mix_in(module, wanted[type(module).__name__], boundaries=boundaries)
    if wanted:
        mix_in(model, NotesDocuments, boundaries=boundaries)


class NotesDocuments:
    """Mixin for a causal language model that records document boundaries for its layers."""

    boundaries: SharedBoundaries

    def forward(self, *args: Any, **inputs: Any) -> Any:
        self.boundaries.given = {name: inputs[name] for name in BOUNDARIES if name in inputs}
        self.boundaries.ends = self.boundaries.given.get("document_ends")
        return super().forward(*args, **inputs)


class WithBoundaries:
    """Mixin for an attention layer whose block does not pass on document boundaries."""

    boundaries: SharedBoundaries

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return super().forward(*args, **inputs | self.boundaries.given)


class PerDocument:
    """Mixin for a recurrent layer: each document starts with an empty state."""

    boundaries: SharedBoundaries

    def forward(self, hidden_states: torch.Tensor, *args: Any, **inputs: Any) -> torch.Tensor:
        """`hidden_states` and the result are (1, tokens, hidden)."""
        if self.boundaries.ends is None:
            return super().forward(hidden_states, *args, **inputs)
        given = {name: value for name, value in inputs.items() if name not in BOUNDARIES}
        assert self.boundaries.ends[-1] == hidden_states.shape[1]
        results: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for group in _alike(self.boundaries.ends):
            index, is_real = _rows(group, hidden_states.device)
            rows = super().forward(hidden_states[0][index], *args, **given)
            results.append(rows[is_real])
            places.append(index[is_real])
        back = torch.cat(places).argsort()
        return torch.cat(results)[back][None]


class PositionsPerDocument:
    """Mixin for LongRoPE (arXiv:2402.13753), whose factors depend on the longest position."""

    boundaries: SharedBoundaries

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **inputs: Any
    ) -> tuple[torch.Tensor, ...]:
        """`position_ids` (1, tokens); returns cosines and sines (1, tokens, rotated)."""
        if self.boundaries.ends is None:
            return super().forward(x, position_ids, *args, **inputs)
        parts = [
            super(PositionsPerDocument, self).forward(
                x, position_ids[:, start:end], *args, **inputs
            )
            for start, end in itertools.pairwise(self.boundaries.ends)
        ]
        return tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))


def _alike(ends: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Group documents (start, end) by length; the longest is less than twice the shortest."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, end in itertools.pairwise(ends):
        groups[(end - start).bit_length()].append((start, end))
    return list(groups.values())


def _rows(
    documents: list[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token indices of documents as rows, and a mask of those that are not padding.

    Both are (documents, longest). Shorter rows are padded with their last index.
    """
    starts, ends = torch.tensor(documents, device=device).T[:, :, None]
    steps = torch.arange(max(end - start for start, end in documents), device=device)
    places = starts + steps
    return torch.minimum(places, ends - 1), places < ends
