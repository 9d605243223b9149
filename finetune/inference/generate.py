"""Load a trained model and generate with it.

A conversation is a list of messages (`{"role": ..., "content": ...}`) and needs a chat template. A
prompt is plain text that the model continues. Images are parts of a content, as in training data.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel, TaskType
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune import catalog
from finetune.checkpoints.base_weights import refuse_other_base
from finetune.checkpoints.stop_tokens import all_ends, network_of
from finetune.data.chat.chat_templates import added_before, text_of_chat
from finetune.data.chat.render import Chat, load_chat
from finetune.data.chat.tokens import Row as Prompt
from finetune.data.formats import read_row
from finetune.data.images.inputs import ImageInputs
from finetune.data.images.processor import ImageProcessor, load_processor, processor_of
from finetune.data.read.sources import HUB_NAME
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError, reading, refuse
from finetune.inference.decoder import Row, decode
from finetune.inference.load import (
    Step,
    adapter_config,
    attach,
    base_model,
    find_checkpoint,
    initial_adapter,
    load_tokenizer,
    load_weights,
    media_of,
    open_checkpoint,
    trained_dtype,
)
from finetune.inference.noise import words_of
from finetune.models.image_parts import inputs_for
from finetune.models.load_checks import context_length, token_rows
from finetune.models.vocabulary import pad_id
from finetune.planner.shapes.config_files import has_score_head
from finetune.process.progress import progress
from finetune.recipe import Recipe
from finetune.runs.run import Run, open_run

SCORES = (
    "it scores texts and does not generate: load it with AutoModelForSequenceClassification, as "
    "its README.md shows; how it scores held-out rows is in the run's report (eval_data, eval_rows)"
)

Message = Mapping[str, Any]
Conversation = Sequence[Message]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer and stop tokens."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    stops: tuple[int, ...]
    """Token ids that end an answer: every eos of the model, and the end of a turn."""
    context: int | None
    """Maximum tokens of prompt and answer together; None if the model has no limit."""
    images: ImageInputs | None = None
    """How images become inputs of the model; None if it reads text only."""

    @property
    def reads(self) -> tuple[Literal["image"], ...]:
        """Media that the model reads beside text."""
        return () if self.images is None else ("image",)

    def chat(self) -> Chat:
        """Its tokenizer with the chat template, and its image processor if it has one."""
        processor: Any = None if self.images is None else self.images.processor
        return load_chat(self.tokenizer, None, images=processor)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Turn:
    """The text that a chat template adds around the content of an assistant message."""

    scaffold: str
    """Text between the generation prompt and the content, such as an empty thinking block."""
    end: int | None
    """Token after the content; None if it is not a single special token."""


# --- loading -----------------------------------------------------------------------------------


def load(
    run: Run | str | Path, step: Step | None = None, dtype: torch.dtype | None = None
) -> Loaded:
    """The trained model of a run; by default its best checkpoint, else the last.

    A quantized base is quantized again, from the same precision as in training.
    """
    run = run if isinstance(run, Run) else open_run(run)
    recipe = catalog.load(run.recipe)
    if recipe.head.scored:
        raise FinetuneError(f"{run.root}: {SCORES}")
    model, tokenizer, adapter = model_of(run, recipe, step, dtype)
    words = find_checkpoint(run, step) / "tokenizer"
    return _loaded(model, tokenizer, adapter, words if recipe.model.reads else None)


def model_of(
    run: Run, recipe: Recipe, step: Step | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase, Path | None]:
    """The model of a run (with its score head, if any), its tokenizer, and its adapter folder."""
    checkpoint = open_checkpoint(run, step)
    tokenizer = load_tokenizer(checkpoint / "tokenizer")
    if not (checkpoint / "adapter").is_dir():
        model = load_weights(
            checkpoint / "model",
            dtype,
            trust_remote_code=recipe.model.trust_remote_code,
            attention=recipe.model.attention,
            head=recipe.head,
            reads=recipe.model.reads,
        )
        return model, tokenizer, None
    if recipe.model.quantization != "none":
        dtype = dtype or trained_dtype(run)
    adapter = checkpoint / "adapter"
    base = base_model(recipe, dtype)
    refuse_other_base(checkpoint, recipe.model)
    return attach(base, adapter, initial_adapter(run)), tokenizer, adapter


def load_base(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model before training; pass the tokenizer of a run to use the same prompt tokens."""
    if tokenizer is None:
        tokenizer = load_tokenizer(recipe.model.tokenizer or recipe.model.name or "")
    images = load_processor(recipe.model, tokenizer)
    return _loaded(base_model(recipe, dtype), tokenizer, images=images)


def open_model(path: str | Path) -> Loaded:
    """The model of a run directory, of a folder with a model or an adapter, or of a hub name."""
    if (Path(path) / "recipe.json").is_file():
        return load(path)
    if not os.path.exists(path) and HUB_NAME.fullmatch(str(path)):
        return _whole(path)
    return load_folder(path)


def _whole(path: str | Path, dtype: torch.dtype | None = None) -> Loaded:
    """A model that is no adapter, in a folder or on the hub."""
    reads = media_of(path)
    model = load_weights(path, dtype, reads=reads)
    return _loaded(model, load_tokenizer(path), images=path if reads else None)


def load_folder(path: str | Path, dtype: torch.dtype | None = None) -> Loaded:
    """The model in an exported folder: a full model, or an adapter with its base."""
    folder = Path(path)
    if (folder / "adapter_config.json").is_file():
        config = adapter_config(folder)
        if config.task_type == TaskType.SEQ_CLS:
            raise FinetuneError(f"{path}: {SCORES}")
        name = str(config.base_model_name_or_path)
        reads = media_of(name, folder, config.revision)
        base = load_weights(name, dtype, revision=config.revision, reads=reads)
        images = folder if reads else None
        return _loaded(attach(base, folder), load_tokenizer(folder), folder, images)
    if not (folder / "config.json").is_file():
        raise FinetuneError(f"{path}: neither a model (config.json) nor an adapter in this folder")
    with reading(f"{folder / 'config.json'}: cannot be read"):
        scores = has_score_head(json.loads((folder / "config.json").read_text()))
    if scores:
        raise FinetuneError(f"{path}: {SCORES}")
    return _whole(folder, dtype)


def _loaded(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Path | None = None,
    images: ImageProcessor | str | Path | None = None,
) -> Loaded:
    """A model with all stop tokens: its own, those of a folder's settings, and the tokenizer's.

    `images` is its image processor, or where that is stored; None if it reads text only.
    """
    network = network_of(model)
    stops = stop_ids(network.generation_config, tokenizer)
    if settings is not None:
        stops = folder_stops(stops, settings, tokenizer)
    # Unset fields of a call would be filled with defaults of the model, such as a penalty.
    network.generation_config = GenerationConfig()
    inputs = image_inputs_of(network, tokenizer, images)
    return Loaded(model, tokenizer, stops, context_length(network.config), inputs)


def image_inputs_of(
    network: Any, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | str | Path | None
) -> ImageInputs | None:
    """How images become inputs of a loaded model, by its processor or where that is stored."""
    if images is None:
        return None
    if not isinstance(images, ImageProcessor):
        images = processor_of(str(images), None, tokenizer)
    return inputs_for(network.config, images)


def folder_stops(
    stops: tuple[int, ...], folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Stop tokens of a model and of the folder of an adapter."""
    own = None
    if (folder / "generation_config.json").is_file():
        with reading(f"{folder / 'generation_config.json'}: cannot be read"):
            own = GenerationConfig.from_pretrained(folder)
    return tuple(sorted({*stops, *stop_ids(own, tokenizer)}))


# --- text around an answer ---------------------------------------------------------------------


def turn(tokenizer: PreTrainedTokenizerBase) -> Turn:
    """The text that the tokenizer's chat template adds around an answer, found by rendering one."""
    words = "\u2042answer\u2042"
    asked = [{"role": "user", "content": "question"}]
    prompt = text_of_chat(tokenizer, asked, header=True)
    answered = [*asked, {"role": "assistant", "content": words}]
    whole = text_of_chat(tokenizer, answered)
    before, _, after = whole.partition(words)
    scaffold = before.removeprefix(prompt) if before.startswith(prompt) else ""
    ids = _encode(tokenizer, after.lstrip())
    single = bool(ids) and ids[0] in tokenizer.added_tokens_decoder
    return Turn(scaffold, ids[0] if single else None)


def stop_ids(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """All tokens that end an answer: eos of the model and the tokenizer, and the end of a turn."""
    eos = generation.eos_token_id if generation is not None else None
    return tuple(all_ends(eos, tokenizer.eos_token_id, turn_end(tokenizer)))


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Token that ends a turn of the tokenizer's chat template; None without a template."""
    return turn(tokenizer).end if tokenizer.chat_template is not None else None


def prompt_ids(loaded: Loaded, asked: str | Conversation) -> list[int]:
    """Token ids of a prompt, or of a conversation with the generation prompt."""
    if isinstance(asked, str):
        return added_before(loaded.tokenizer) + _encode(loaded.tokenizer, asked)
    if loaded.tokenizer.chat_template is None:
        raise FinetuneError(
            "the tokenizer has no chat template: use a plain prompt instead of messages, or "
            "train with model.chat_template"
        )
    return _encode(loaded.tokenizer, text_of_chat(loaded.tokenizer, asked, header=True))


def prompt_of(loaded: Loaded, asked: str | Conversation) -> Prompt:
    """`prompt_ids`, with the images among them.

    Raises:
        FinetuneError: an image cannot be read, or the model reads text only.
    """
    if isinstance(asked, str) or not any(isinstance(m.get("content"), list) for m in asked):
        ids = prompt_ids(loaded, asked)
        return Prompt(ids, [False] * len(ids))
    try:
        sample: Any = read_row("messages", {"messages": list(asked)})
        return loaded.chat().prompt_row(sample)
    except RowProblem as problem:
        raise FinetuneError(str(problem)) from None


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def new_text(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], new: list[int], special: bool = False
) -> str:
    """Text of `new` after `prompt`; decoded alone, some tokenizers drop a leading space.

    With `special`, the special tokens of `new` are in the text, except padding and BOS.
    """
    if special:
        outer = (tokenizer.pad_token_id, tokenizer.bos_token_id)
        new = [token for token in new if token not in outer]
    before, whole, alone = (
        str(tokenizer.decode(ids, skip_special_tokens=not special))
        for ids in (prompt, prompt + new, new)
    )
    return whole[len(before) :] if whole.startswith(before) else alone


# --- answering ---------------------------------------------------------------------------------


def generate(
    loaded: Loaded,
    prompts: Sequence[str | Conversation],
    max_new_tokens: int = 256,
    batch_rows: int = 8,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> list[str]:
    """The new text for each prompt, in order; greedy at temperature 0.

    An answer ends at a stop token, after `max_new_tokens`, or when the model's context is full. It
    does not depend on other rows in its batch.

    Raises:
        FinetuneError: a prompt leaves no room for an answer in the context.
    """
    rows = [prompt_of(loaded, asked) for asked in prompts]
    more = (top_k, min_p, repetition_penalty)
    found = continue_ids(loaded, rows, max_new_tokens, batch_rows, temperature, top_p, *more)
    return [text_of(loaded, row) for row in found]


def text_of(loaded: Loaded, row: Row) -> str:
    """The text that continues a prompt."""
    return new_text(loaded.tokenizer, list(row.prompt), row.text_ids)


def continue_ids(
    loaded: Loaded,
    prompts: Sequence[list[int] | Prompt],
    max_new_tokens: int = 256,
    batch_rows: int = 8,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> list[Row]:
    """Rows with the tokens that continue each prompt of token ids, in order."""
    rows = [row_of(loaded, each, max_new_tokens, temperature, top_p) for each in prompts]
    problems = [f"prompt {i}: it is empty" for i, row in enumerate(rows) if not row.prompt]
    problems += [
        f"prompt {i}: {len(row.prompt)} tokens leave no room in a context of {loaded.context}"
        for i, row in enumerate(rows)
        if row.limit < 1
    ]
    refuse(problems)
    for number, row in enumerate(rows):
        row.name, row.top_k, row.min_p = (number, 0), top_k, min_p
        row.repetition_penalty = repetition_penalty
    with progress("generating", len(rows), "answers") as count, torch.inference_mode():
        decode(
            loaded.model, rows, pad_of(loaded), batch_rows, random_key(), inputs=loaded.images,
            report=count,
        )  # fmt: skip
    return rows


def row_of(
    loaded: Loaded,
    prompt: list[int] | Prompt,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> Row:
    """A row to continue; its limit is less than 1 if the prompt fills the context."""
    ids, images = (prompt.ids, prompt.images) if isinstance(prompt, Prompt) else (prompt, ())
    left = max_new_tokens if loaded.context is None else loaded.context - len(ids)
    limit = min(max_new_tokens, left)
    return Row(ids, limit, loaded.stops, temperature, top_p, images=images)


def random_key() -> tuple[int, int]:
    """A key for the noise of rows, from torch's generator."""
    return words_of(int(torch.randint(2**63 - 1, ())))


def pad_of(loaded: Loaded) -> int:
    """Token id of the padding on the left, which is masked."""
    return pad_id(loaded.tokenizer, token_rows(loaded.model))
