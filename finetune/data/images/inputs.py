"""Inputs of a model for the images of a micro-batch, and the positions of its tokens."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.images.image_file import PlacedImage
from finetune.data.images.processor import GRID, ImageProcessor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ImageInputs:
    """How images become inputs of a model."""

    processor: ImageProcessor
    everywhere: bool = False
    """Whether a micro-batch without images gets a filler with one, so that every rank runs the
    tower in every pass and each of its parameters has a gradient."""
    positions: Callable[..., Any] | None = None
    """The model's `get_rope_index`; None if the positions of images are those of text."""
    token_types: str | None = None
    """Name of the input that marks tokens of images; None if the model has none."""

    def types(self, ids: np.ndarray) -> np.ndarray:
        """1 for each token that a feature of an image replaces, else 0.  # as ids, int64"""
        return np.isin(ids, self.processor.token_ids).astype(np.int64)

    def tensors(
        self, documents: Sequence[Sequence[PlacedImage]], is_filled: bool
    ) -> "dict[str, torch.Tensor]":
        """Tensors of the images of documents, or of a filler, by the names of the inputs."""
        return dict(self.processor.filler[1]) if is_filled else self.processor.tensors(documents)

    def of_row(
        self, ids: Sequence[int], images: Sequence[PlacedImage]
    ) -> "dict[str, torch.Tensor]":
        """Inputs for the images of one row of tokens that is passed through the model alone."""
        import torch

        found = self.processor.tensors([images])
        if self.token_types is not None:
            found[self.token_types] = torch.from_numpy(self.types(np.array(ids)[None]))
        return found

    def document_positions(
        self,
        documents: Iterable[tuple[np.ndarray, int]],
        tensors: "Mapping[str, torch.Tensor]",
    ) -> "torch.Tensor":
        """Positions of concatenated documents.  # (4, 1, tokens) int64

        The first row counts the tokens of each document, by which transformers 5.23 keeps documents
        apart; the others are places in time, height and width.

        Args:
            documents: Token ids of each document, and the number of its images.
            tensors: Those of all images, in order.
        """
        import torch

        assert self.positions is not None
        grids, parts = iter(tensors.get(GRID, ())), list[torch.Tensor]()
        taken = inspect.signature(self.positions).parameters
        for ids, images in documents:
            own = torch.arange(len(ids)).expand(4, -1)
            if images:
                known = {
                    "input_ids": torch.from_numpy(ids.astype(np.int64))[None],
                    "mm_token_type_ids": torch.from_numpy(self.types(ids))[None],
                    "image_grid_thw": torch.stack([next(grids) for _ in range(images)]),
                }
                given = {name: value for name, value in known.items() if name in taken}
                placed, _ = self.positions(**given)  # (3, 1, tokens)
                own = torch.cat([own[:1], placed[:, 0]])
            parts.append(own)
        return torch.cat(parts, dim=1)[:, None]
