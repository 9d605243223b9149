"""Fix SentencePiece-like tokenizers in GGUF files, so that token ids are those of training.

transformers 5 does not save `tokenizer.model`. Without it, llama.cpp's converter gives every token
of such a tokenizer (Llama 2, Mistral) the same score, treats special tokens such as `[INST]` as
plain text, and leaves the space prefix and the BOS at their defaults. llama.cpp then produces other
token ids than training, without a warning.
"""

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from finetune.errors import TrainingFailure
from finetune.version import install

SPACE = "\u2581"
"""Symbol for a space in tokens."""
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Token types of llama.cpp that are split from the text before the rest is merged."""


def is_sentence_piece(tokenizer: dict[str, Any]) -> bool:
    """Whether the tokenizer of a `tokenizer.json` has type `llama` in llama.cpp."""
    model = tokenizer["model"]
    return model["type"] == "BPE" and bool(model.get("byte_fallback"))


def merge_scores(tokenizer: dict[str, Any]) -> dict[int, float]:
    """Scores by token id with which llama.cpp merges in the order of a `tokenizer.json`.

    llama.cpp merges the pair whose token has the highest score; BPE merges the pair with the lowest
    rank.

    Args:
        tokenizer: Contents of a `tokenizer.json` with a BPE model.
    """
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    scores: dict[int, float] = {}
    for rank, merge in enumerate(tokenizer["model"]["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        scores.setdefault(vocabulary[left + right], float(-rank))
    return scores


def added_types(tokenizer: dict[str, Any]) -> dict[int, int]:
    """Types of the added tokens of a `tokenizer.json`, by id; both libraries split at them."""
    return {
        each["id"]: CONTROL if each["special"] else USER_DEFINED
        for each in tokenizer["added_tokens"]
    }


def has_space_prefix(tokenizer: dict[str, Any]) -> bool:
    """Whether a space is added before every text between special tokens, not only the first."""
    return any(
        step["type"] == "Prepend" or step.get("prepend_scheme") == "always"
        for step in _steps(tokenizer)
    )


def _steps(tokenizer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = tokenizer.get(key)
        if step is not None:
            yield from step[inner] if step["type"] == "Sequence" else [step]


def state_defaults(folder: Path, opens: bool) -> None:
    """Write explicit values for the converter's defaults into `tokenizer_config.json`.

    Args:
        folder: Folder of the tokenizer.
        opens: Whether the prompts of training begin with the BOS.
    """
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config["add_bos_token"] = opens
    if is_sentence_piece(tokenizer):
        config["add_prefix_space"] = has_space_prefix(tokenizer)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def repair(path: Path, folder: Path) -> None:
    """Correct the scores, token types and BOS of a GGUF file that the converter wrote.

    Args:
        path: GGUF file, which is changed in place.
        folder: Folder of the tokenizer, after `state_defaults`.
    """
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    fields = _open(path, "r+")
    adds_bos = _field(fields, "add_bos_token")
    if adds_bos is not None:  # the converter prefers the post-processor to the configuration
        adds_bos.parts[adds_bos.data[0]][:] = config["add_bos_token"]
    if _kind(fields) == "llama" and is_sentence_piece(tokenizer):
        _set(_field(fields, "scores"), merge_scores(tokenizer))
        _set(_field(fields, "token_type"), added_types(tokenizer))
    fields.data.flush()


def _set(field: Any, values: Mapping[int, float]) -> None:
    for id, value in values.items():
        field.parts[field.data[id]][:] = value


def _field(reader: Any, key: str) -> Any:
    return reader.get_field(f"tokenizer.ggml.{key}")


class Reader:
    """Tokenizes text as llama.cpp does, with the tokenizer of a GGUF file of type `llama`."""

    def __init__(self, fields: Any) -> None:
        """Read the tokenizer of an open GGUF file; see `open_reader`."""
        tokens: list[str] = _field(fields, "tokens").contents()
        types: list[int] = _field(fields, "token_type").contents()
        self._ids = {token: id for id, token in enumerate(tokens)}
        self._scores: list[float] = _field(fields, "scores").contents()
        cut = [
            token
            for token, type in zip(tokens, types, strict=True)
            if type in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
        self._cut = sorted(cut, key=lambda token: -len(token.encode()))  # as llama.cpp
        prefix, adds_bos, bos = (
            _field(fields, key) for key in ("add_space_prefix", "add_bos_token", "bos_token_id")
        )
        self._prefix = prefix is None or bool(prefix.contents())
        opens = bos is not None and (adds_bos is None or bool(adds_bos.contents()))
        self._bos = int(bos.contents()) if opens else None

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered prompt; a BOS is added unless the template writes it."""
        found = list(self._pieces(text))
        if self._bos is not None and found[:1] != [self._bos]:
            return [self._bos, *found]
        return found

    def _pieces(self, text: str) -> Iterator[int]:
        parts: list[str | int] = [text]
        for token in self._cut:
            if token in text:
                parts = [each for part in parts for each in _split(part, token, self._ids[token])]
        after_special = True
        for part in parts:
            if isinstance(part, int):
                yield part
                after_special = True
            elif part:
                spaced = f" {part}" if self._prefix and after_special else part
                yield from self._merged(spaced.replace(" ", SPACE))
                after_special = False

    def _merged(self, text: str) -> Iterator[int]:
        """Merge the pair with the highest score, the first among equals, until none is left."""
        parts: list[str] = list(text)
        left, right = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
        queue: list[tuple[float, int, str]] = []

        def offer(first: int) -> None:
            if first < 0 or right[first] >= len(parts):
                return
            pair = parts[first] + parts[right[first]]
            if pair in self._ids:
                heapq.heappush(queue, (-self._scores[self._ids[pair]], first, pair))

        for first in range(len(parts) - 1):
            offer(first)
        while queue:
            _, first, pair = heapq.heappop(queue)
            second = right[first]
            if not parts[first] or second >= len(parts) or parts[first] + parts[second] != pair:
                continue
            parts[first], parts[second] = pair, ""
            right[first] = right[second]
            if right[second] < len(parts):
                left[right[second]] = first
            offer(left[first])
            offer(first)
        for part in filter(None, parts):
            yield from self._piece_ids(part)

    def _piece_ids(self, part: str) -> Sequence[int]:
        if part in self._ids:
            return [self._ids[part]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in part.encode()]


def open_reader(path: Path) -> Reader | None:
    """A reader for a GGUF file; None if its tokenizer has another type than `llama`."""
    fields = _open(path)
    return Reader(fields) if _kind(fields) == "llama" else None


def _open(path: Path, mode: Literal["r", "r+"] = "r") -> Any:
    """Open a GGUF file.

    Raises:
        TrainingFailure: the file is damaged, or of a version that the package `gguf` cannot read.
    """
    from gguf import GGUFReader

    try:
        return GGUFReader(path, mode)
    except (ValueError, LookupError, TypeError) as error:
        raise TrainingFailure(
            f"the converter wrote {path.name}, which the package gguf cannot read ({error}); use "
            f"another checkout of llama.cpp, or update the package: {install('gguf')}"
        ) from None


def _kind(fields: Any) -> str:
    """Type of the tokenizer in a GGUF file."""
    found = _field(fields, "model")
    if found is None:
        raise TrainingFailure("the converter wrote a GGUF file without a tokenizer")
    return found.contents()


def _split(part: str | int, token: str, id: int) -> Iterator[str | int]:
    if isinstance(part, int):
        yield part
        return
    first, *others = part.split(token)
    yield first
    for each in others:
        yield id
        yield each
