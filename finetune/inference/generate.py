"""Load a trained model and generate with it.

A conversation is a list of messages (`{"role": ..., "content": ...}`) and needs a chat template. A
prompt is plain text that the model continues.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel, TaskType
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from finetune import catalog
from finetune.checkpoints.base_weights import refuse_other_base
from finetune.checkpoints.handover import all_ends
from finetune.data.chat.chat_templates import added_before, text_of_chat
from finetune.data.sources import HUB_NAME
from finetune.errors import FinetuneError, reading
from finetune.inference.load import (
    Step,
    adapter_config,
    attach,
    base_model,
    initial_adapter,
    load_tokenizer,
    load_weights,
    open_checkpoint,
    trained_dtype,
)
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
    if recipe.scores is not None:
        raise FinetuneError(f"{run.root}: {SCORES}")
    return _loaded(*model_of(run, recipe, step, dtype))


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
            scores=recipe.scores,
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
    return _loaded(base_model(recipe, dtype), tokenizer)


def open_model(path: str | Path) -> Loaded:
    """The model of a run directory, of a folder with a model or an adapter, or of a hub name."""
    if (Path(path) / "recipe.json").is_file():
        return load(path)
    if not os.path.exists(path) and HUB_NAME.fullmatch(str(path)):
        return _loaded(load_weights(path), load_tokenizer(path))
    return load_folder(path)


def load_folder(path: str | Path, dtype: torch.dtype | None = None) -> Loaded:
    """The model in an exported folder: a full model, or an adapter with its base."""
    folder = Path(path)
    if (folder / "adapter_config.json").is_file():
        config = adapter_config(folder)
        if config.task_type == TaskType.SEQ_CLS:
            raise FinetuneError(f"{path}: {SCORES}")
        base = load_weights(str(config.base_model_name_or_path), dtype, revision=config.revision)
        return _loaded(attach(base, folder), load_tokenizer(folder), folder)
    if not (folder / "config.json").is_file():
        raise FinetuneError(f"{path}: neither a model (config.json) nor an adapter in this folder")
    with reading(f"{folder / 'config.json'}: cannot be read"):
        scores = has_score_head(json.loads((folder / "config.json").read_text()))
    if scores:
        raise FinetuneError(f"{path}: {SCORES}")
    return _loaded(load_weights(folder, dtype), load_tokenizer(folder))


def _loaded(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Path | None = None,
) -> Loaded:
    """A model with all stop tokens: its own, those of a folder's settings, and the tokenizer's."""
    network: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    stops = stop_ids(network.generation_config, tokenizer)
    if settings is not None:
        stops = folder_stops(stops, settings, tokenizer)
    # Unset fields of a call would be filled with defaults of the model, such as a penalty.
    network.generation_config = GenerationConfig()
    return Loaded(model, tokenizer, stops, context_length(network.config))


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
    end = turn(tokenizer).end if tokenizer.chat_template is not None else None
    return tuple(all_ends(eos, tokenizer.eos_token_id, end))


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
) -> list[str]:
    """The new text for each prompt, in order; greedy at temperature 0.

    An answer ends at a stop token, after `max_new_tokens`, or when the model's context is full. It
    does not depend on other rows in its batch.

    Raises:
        FinetuneError: a prompt leaves no room for an answer in the context.
    """
    rows = [prompt_ids(loaded, asked) for asked in prompts]
    found = continue_ids(loaded, rows, max_new_tokens, batch_rows, temperature, top_p)
    return [each.text for each in found]


class Continued(NamedTuple):
    """Generated text after a prompt."""

    text: str
    cut: bool
    """Whether it reached the maximum number of tokens."""
    tokens: int
    """Tokens before the stop token."""


def continue_ids(
    loaded: Loaded,
    rows: Sequence[list[int]],
    max_new_tokens: int = 256,
    batch_rows: int = 8,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> list[Continued]:
    """Generated text for each prompt of token ids, in order."""
    rooms = [room_for(loaded, len(row), max_new_tokens) for row in rows]
    problems = [f"prompt {i}: it is empty" for i, row in enumerate(rows) if not row]
    problems += [
        f"prompt {i}: {len(rows[i])} tokens leave no room in a context of {loaded.context}"
        for i, room in enumerate(rooms)
        if room < 1
    ]
    if problems:
        raise FinetuneError(*problems)
    answers = [Continued("", False, 0)] * len(rows)
    with progress("generating", len(rows), "answers") as count:
        for room, batch in _batches(rows, rooms, batch_rows):
            new = continue_rows(loaded, [rows[i] for i in batch], room, temperature, top_p)
            for i, ids in zip(batch, new, strict=True):
                text = new_text(loaded.tokenizer, rows[i], ids)
                answers[i] = Continued(text, len(ids) >= room, len(ids))
            count(len(batch))
    return answers


def room_for(loaded: Loaded, tokens: int, max_new_tokens: int) -> int:
    if loaded.context is None:
        return max_new_tokens
    return min(max_new_tokens, loaded.context - tokens)


def _batches(
    rows: Sequence[list[int]], rooms: list[int], batch_rows: int
) -> Iterator[tuple[int, list[int]]]:
    """Batches of row indices with the same room and similar lengths, to minimize padding."""
    order = sorted(range(len(rows)), key=lambda i: (rooms[i], len(rows[i])))
    for room, same in itertools.groupby(order, key=lambda i: rooms[i]):
        indices = list(same)
        for start in range(0, len(indices), batch_rows):
            yield room, indices[start : start + batch_rows]


def continue_rows(
    loaded: Loaded,
    rows: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    streamer: BaseStreamer | None = None,
    *,
    stopping: Sequence[StoppingCriteria] = (),
    processors: Sequence[LogitsProcessor] = (),
) -> list[list[int]]:
    """New token ids of each row, without its first stop token and what follows.

    Args:
        stopping: Additional stopping criteria.
        processors: Logits processors that run before temperature and top_p.
    """
    pad = _pad_id(loaded)
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])  # (rows, longest)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=list(loaded.stops) or None,
        pad_token_id=pad,
        use_cache=True,
        **sampling,
    )
    model: Any = loaded.model  # PEFT's wrapper does not type the methods that it forwards
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=config,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList(stopping),
            logits_processor=LogitsProcessorList(processors),
        )
    stops = set(loaded.stops)
    new = out[:, longest:].tolist()
    return [list(itertools.takewhile(lambda id: id not in stops, row)) for row in new]


def _pad_id(loaded: Loaded) -> int:
    """Token id of the padding on the left, which is masked, and after the stop token.

    Answers are truncated at their first stop token, so it may also be an eos.
    """
    network: Any = loaded.model
    return pad_id(loaded.tokenizer, token_rows(network))
