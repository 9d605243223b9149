"""Reads what the ranks of a job saved of each parameter, whoever wrote it."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finetune.errors import FinetuneError

KEPT = "kept"
"""Key in `state/` of tensors that training does not update and that a result needs all the same."""


class Reader:
    """Reads ranges of parameters from the fragments of a checkpoint, whoever wrote them."""

    def __init__(self, folder: Path) -> None:
        self.files = [
            safe_open(path, framework="pt")
            for path in sorted((folder / "state").glob("*.safetensors"))
        ]
        self.places: dict[tuple[str, str], list[tuple[int, int, Any, str]]] = {}
        self.uncut: dict[str, dict[str, torch.Tensor]] = {}
        for file in self.files:
            for label in file.keys():  # noqa: SIM118 (not a dict)
                name, key, start = label.rsplit("|", 2)
                if start == "whole":
                    self.uncut.setdefault(name, {})[key] = file.get_tensor(label)
                    continue
                numel = file.get_slice(label).get_shape()[0]
                self.places.setdefault((name, key), []).append((int(start), numel, file, label))
        for places in self.places.values():
            places.sort(key=lambda place: place[0])

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()
        self.places.clear()

    def kept(self) -> dict[str, torch.Tensor]:
        """Tensors that training does not update, by name."""
        return {name: values[KEPT] for name, values in self.uncut.items() if KEPT in values}

    def keys(self, name: str) -> list[str]:
        return [key for known, key in self.places if known == name]

    def range(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Flat elements [start, start + numel) of a parameter's value.

        Raises:
            FinetuneError: the checkpoint does not hold all of them.
        """
        pieces: list[torch.Tensor] = []
        reached = start
        for first, size, file, label in self.places.get((name, key), []):
            begin, end = max(reached, first), min(start + numel, first + size)
            if begin == reached and begin < end:
                pieces.append(file.get_slice(label)[begin - first : end - first])
                reached = end
        if reached != start + numel:
            raise FinetuneError(
                f"the checkpoint holds no elements {reached} to {start + numel} of {name} ({key}): "
                "it is of another model or adapter, or a rank's file is missing"
            )
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def whole(self, name: str, key: str) -> torch.Tensor:
        last = self.places.get((name, key), [(0, 0, None, "")])[-1]
        return self.range(name, key, 0, last[0] + last[1])
