"""The image processor of a model: the tokens of an image, and its tensors.

The chat template writes one placeholder for an image. The processor's own rule expands it, by the
size of the image alone, to the tokens that its features replace:

    message    Which colour is \\ufffc?
    template   ...Which colour is <|vision_start|><|image_pad|><|vision_end|>?...
    expanded   ...Which colour is <|vision_start|><|image_pad|><|image_pad|><|vision_end|>?...

Images are always resized by Pillow, so that a machine with torchvision computes the same numbers.
"""

import copy
import importlib
import importlib.util
import json
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.chat.template_spans import Span
from finetune.data.images.image_file import ImageFile, PlacedImage, decode, digest_of
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError, did_you_mean, first_line, reading
from finetune.process.rendezvous import neighbours
from finetune.recipe import Model
from finetune.runs.limits import usable_cores

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PreTrainedTokenizerBase

IMAGE_FILE, WHOLE_FILE = "preprocessor_config.json", "processor_config.json"
FILES = (IMAGE_FILE, WHOLE_FILE, "video_preprocessor_config.json")
"""Files of a processor next to those of its tokenizer, in transformers 5.23."""
TEMPLATE_FILE = "chat_template.json"
"""Where older processors have their chat template, which then no tokenizer has."""
SMALLEST, LARGEST = 8, 512
"""Width and height in pixels of the image of a filler document, before it is resized."""
GRID = "image_grid_thw"
"""Input with the patches of each image in time, height and width, from which positions follow. A
model that has it reads the patches of all images concatenated."""
UNCUT = ("do_image_splitting", "crop_to_patches", "do_pan_and_scan")
"""Settings that cut an image into tiles, by processor: a filler is one tile."""
OF_CALLS = {"device", "return_tensors", "disable_grouping", "input_data_format", "data_format"}
"""Arguments of an image processor that are no settings of a model."""
Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True)
class Expanded:
    """A rendered text whose placeholders are expanded to the tokens of their images."""

    text: str
    before: tuple[Span, ...] = ()
    """Each placeholder in the rendered text, in characters."""
    after: tuple[Span, ...] = ()
    """Its expansion in `text`."""
    digests: tuple[str, ...] = ()
    """Of the compressed bytes of each image."""
    notes: frozenset[str] = frozenset()
    """Unusual properties of the images, by the names in `finetune.data.tally.COUNTED`."""

    def moved(self, span: Span) -> Span:
        """A span of the rendered text, in `text`."""
        start, end = (self._moved(at) for at in span)
        return start, end

    def _moved(self, at: int) -> int:
        behind = [pair for pair in zip(self.before, self.after, strict=True) if pair[0][1] <= at]
        return at + (behind[-1][1][1] - behind[-1][0][1] if behind else 0)


@dataclass(frozen=True)
class ImageProcessor:
    """A model's image processor; can be sent to another process."""

    kind: str
    """Class of the complete processor in transformers."""
    files: Mapping[str, dict[str, Any]]
    """Content of its files, by name; they are saved with a result."""
    images: Any
    """The image processor of transformers, with Pillow."""
    tokenizer: "PreTrainedTokenizerBase"
    _texts: dict[tuple[Size, bool], str] = field(default_factory=dict, init=False, compare=False)
    _of_thread: threading.local = field(default_factory=threading.local, init=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("kind", "files", "images", "tokenizer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _texts={}, _of_thread=threading.local())

    @property
    def identity(self) -> str:
        """Text that differs for processors with other settings."""
        return json.dumps(
            [self.kind, self.images.to_dict(), self.files], sort_keys=True, default=str
        )

    @property
    def whole(self) -> Any:
        """The complete processor, with None for the parts of other media, one for each thread.

        Its tokenizer is a copy: a fast tokenizer cannot be used by two threads at once, and batches
        are made in a thread of their own.
        """
        made = getattr(self._of_thread, "whole", None)
        if made is None:
            made = self._of_thread.whole = self._made()
        return made

    def _made(self) -> Any:
        """A complete processor.

        transformers 5.23 refuses such a processor if torchvision or num2words is missing, although
        only videos need them.
        """
        import transformers

        module = _module_of(getattr(transformers, self.kind).__module__)
        base = getattr(module, self.kind)
        if getattr(module, "num2words", base) is None:
            module.num2words = _words_of_videos
        there = {"image_processor": self.images, "tokenizer": copy.deepcopy(self.tokenizer)}
        unchecked = {"check_argument_for_proper_class": lambda *_: None}
        kind = type(self.kind, (base,), unchecked)
        parts = [there.get(name) for name in base.get_attributes()]
        return kind.from_args_and_dict(parts, dict(self.files.get(WHOLE_FILE, {})))

    @property
    def token(self) -> str:
        """What the chat template writes for an image."""
        return self.whole.image_token

    @cached_property
    def token_ids(self) -> np.ndarray:
        """Ids of the tokens whose embeddings are replaced by features.  # (kinds,) int64"""
        # The processor of Janus names none.
        named = [each for each in self.whole.image_token_ids if each is not None]
        return np.unique(named or [self.tokenizer.convert_tokens_to_ids(self.token)])

    def save(self, folder: Path) -> None:
        """Write its files next to those of the tokenizer."""
        for name, fields in self.files.items():
            text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")

    # Tokens.

    def expand(self, text: str, images: Sequence[ImageFile]) -> Expanded:
        """Expand the placeholders of a rendered text.

        Raises:
            RowProblem: an image cannot be read, or there are more or fewer than placeholders.
        """
        found = [match.span() for match in re.finditer(re.escape(self.token), text)]
        if len(found) != len(images):
            raise RowProblem(
                f"the chat template writes {len(found)} times {self.token} for {len(images)} "
                "images; take it out of the texts of the row, or set model.chat_template to a "
                "template that writes every image"
            )
        pieces, after, digests, notes = list[str](), list[Span](), list[str](), set[str]()
        last = length = 0
        for (start, end), file in zip(found, images, strict=True):
            data = file.read()
            image, own = decode(data, file.name)
            expansion = self.text_of(image.size, len(images) == 1, file.name)
            pieces += [text[last:start], expansion]
            length += start - last + len(expansion)
            after.append((length - len(expansion), length))
            digests.append(digest_of(data))
            notes |= own
            last = end
        whole = "".join([*pieces, text[last:]])
        return Expanded(whole, tuple(found), tuple(after), tuple(digests), frozenset(notes))

    def tokens_of(self, size: Size, alone: bool, name: str) -> int:
        """Tokens of an image of a size, which may be `alone` in its row.

        Raises:
            RowProblem: the processor refuses the size.
        """
        text = self.text_of(size, alone, name)
        return len(self.whole.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_of(self, size: Size, alone: bool, name: str) -> str:
        """The text of an image: a blank one of its size gives it.

        Whether it is `alone` in its row matters to LLaVA-OneVision, which then cuts it into tiles.
        """
        if (size, alone) not in self._texts:
            from PIL import Image

            blank = Image.new("RGB", size)
            found = self._processed([[blank] if alone else [blank, blank]], name)
            self._texts[size, alone] = _first_text(found)
        return self._texts[size, alone]

    def _processed(
        self, images: Sequence[Sequence["Image.Image"]], name: str, **settings: bool
    ) -> Any:
        """What the processor makes of the images of some documents, and their placeholders."""
        text = [self.token * len(each) for each in images]
        try:
            return self.whole(
                images=images, text=text, return_text_replacement_offsets=True,
                images_kwargs={"return_tensors": "pt", **settings},
                text_kwargs={"padding": False, "return_tensors": None},
            )  # fmt: skip
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise RowProblem(
                f"{name}: the image processor refuses it: {first_line(error)}"
            ) from None

    # Tensors.

    def tensors(self, documents: Sequence[Sequence[PlacedImage]]) -> "dict[str, torch.Tensor]":
        """The tensors of the images of some documents, by the names of the model's inputs.

        Raises:
            FinetuneError: a file is gone, or has changed since its row was prepared.
        """
        import torch

        files = [each for images in documents for each in images]
        if not files:
            return {}
        if GRID in self.filler[1]:
            parts = list(self._threads.map(self._patches, files))
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        decoded = [[_decoded(each) for each in images] for images in documents if images]
        return self._tensors(self._processed(decoded, "the images of a micro-batch"))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """Threads for images: one for each core of this process but that of its training."""
        return ThreadPoolExecutor(max(1, usable_cores() // neighbours() - 1), "images")

    def _patches(self, image: PlacedImage) -> "dict[str, torch.Tensor]":
        """The tensors of one image, where those of several are concatenated."""
        return dict(self.images([_decoded(image)], return_tensors="pt"))

    def _tensors(self, found: Any) -> "dict[str, torch.Tensor]":
        import torch

        text = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids",
                "text_replacement_offsets", *self.whole.unused_input_names)  # fmt: skip
        return {
            name: value if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))
            for name, value in found.items()
            if name not in text
        }

    @cached_property
    def filler(self) -> "tuple[np.ndarray, dict[str, torch.Tensor]]":
        """A document of one small image, (tokens,) int32, and the tensors of its image."""
        return self._filler(SMALLEST)

    def _filler(self, size: int) -> "tuple[np.ndarray, dict[str, torch.Tensor]]":
        from PIL import Image

        # Not black: an image of zeros could be taken for padding.
        image = Image.new("RGB", (size, size), (90, 120, 150))
        known = self.images.valid_kwargs.__annotations__
        uncut = {name: False for name in UNCUT if name in known}
        found = self._processed([[image]], "a filler", **uncut)
        ids = self.tokenizer(_first_text(found), add_special_tokens=False)["input_ids"]
        most = max(map(ids.count, self.token_ids.tolist()))
        # Mistral 3 of transformers 5.23 cannot read an image of one token.
        if (most == 1 or not ids) and size < LARGEST:
            return self._filler(2 * size)
        return np.array(ids, dtype=np.int32), self._tensors(found)


def expanded(processor: ImageProcessor | None, text: str, images: Sequence[ImageFile]) -> Expanded:
    """A rendered text with the tokens of its images.

    Raises:
        FinetuneError: it has images, and the model reads text only.
        RowProblem: as `ImageProcessor.expand`.
    """
    if processor is not None:
        return processor.expand(text, images)
    if images:
        raise FinetuneError(
            "the row has images, and the model reads text only; set model.reads=[image] for a "
            "model that reads images, or leave them out of the row"
        )
    return Expanded(text)


def _first_text(found: Any) -> str:
    """The text that stands for the first image."""
    return found["text_replacement_offsets"][0][0]["replacement"]


def _decoded(image: PlacedImage) -> "Image.Image":
    try:
        data = image.file.read()
    except RowProblem as problem:
        raise FinetuneError(f"data: {problem}") from None
    if digest_of(data) != image.digest:
        raise FinetuneError(changed(image.file.name))
    return decode(data, image.file.name)[0]


def changed(name: str, folder: Path | None = None) -> str:
    """Says that an image is not the one that the rows in a folder were prepared from."""
    again = "start again" if folder is None else f"delete {folder} to prepare the rows again"
    return f"data: {name} has changed since the rows were prepared; restore it, or {again}"


def _module_of(name: str) -> Any:
    """The module of a processor.

    In transformers 5.23 that of Pixtral imports a function of the processor with torchvision.
    It counts tokens for servers; nothing here calls it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        beside = name.replace(".processing_", ".image_processing_")
        sys.modules[beside] = SimpleNamespace(get_resize_output_image_size=None)  # type: ignore[assignment]
        try:
            return importlib.import_module(name)
        finally:
            sys.modules.pop(beside, None)


def _words_of_videos(*_: Any) -> str:
    raise NotImplementedError("the length of a video in words")


# Files.


def load_processor(model: Model, tokenizer: "PreTrainedTokenizerBase") -> ImageProcessor | None:
    """The image processor of a recipe's model; None if it reads text only.

    A chat template that only the processor has is given to the tokenizer.

    Raises:
        FinetuneError: it has none, or not the settings of `model.processor_kwargs`.
    """
    if not model.reads:
        return None
    name = str(model.name or model.tokenizer)
    return processor_of(name, model.revision, tokenizer, model.processor_kwargs)


def processor_of(
    name: str,
    revision: str | None,
    tokenizer: "PreTrainedTokenizerBase",
    settings: Mapping[str, Any] | None = None,
) -> ImageProcessor:
    """The image processor of a folder or hub model, as `load_processor` says."""
    from transformers import AutoImageProcessor, PreTrainedConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    with reading(f"model.reads: '{name}' has no image processor that can be loaded"):
        files = {each: _json(name, each, revision) for each in (*FILES, TEMPLATE_FILE)}
        images: Any = AutoImageProcessor.from_pretrained(name, revision=revision, backend="pil")
        named = (files[each].get("processor_class") for each in (WHOLE_FILE, IMAGE_FILE))
        kind = next(filter(None, named), None)
        if kind is None:
            config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
            kind = PROCESSOR_MAPPING_NAMES[config["model_type"]]
            files[WHOLE_FILE] |= {"processor_class": kind}
    template = files.pop(TEMPLATE_FILE).get("chat_template")
    if template is not None:  # servers take it before that of a tokenizer
        tokenizer.chat_template = template
    for setting, value in (settings or {}).items():
        known = images.valid_kwargs.__annotations__.keys() - OF_CALLS
        if setting not in known:
            raise FinetuneError(
                f"model.processor_kwargs: {type(images).__name__} has no setting '{setting}'"
                f"{did_you_mean(setting, known)}; it has {', '.join(sorted(known))}"
            )
        inside = files[WHOLE_FILE].get("image_processor")
        (files[IMAGE_FILE] if inside is None else inside)[setting] = value
    if settings:
        with reading("model.processor_kwargs: the image processor refuses them"):
            images = type(images)(**{**images.to_dict(), **settings})
    kept = {each: fields for each, fields in files.items() if fields}
    return ImageProcessor(kind, kept, images, tokenizer)


def has_processor(name: str, revision: str | None = None) -> bool:
    """Whether a folder or hub model has an image processor, and this machine has Pillow."""
    if importlib.util.find_spec("PIL") is None:
        return False
    whole = _json(name, WHOLE_FILE, revision)
    return "image_processor" in whole or bool(_json(name, IMAGE_FILE, revision))


def copy_processor(source: Path, folder: Path) -> None:
    """Copy the files of a saved processor, if there is one."""
    for name in FILES:
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


def _json(name: str, file: str, revision: str | None) -> dict[str, Any]:
    """The content of a file of a model; empty if there is none."""
    from transformers.utils import cached_file

    found = cached_file(
        name, file, revision=revision, _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
