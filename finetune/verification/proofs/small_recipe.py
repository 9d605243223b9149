"""Shrink a recipe's model for a proof, with this machine's copy of its tokenizer and data.

Replacements for what this machine does not have are listed in notes.
"""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from finetune.data.prepare import Prepared, prepare
from finetune.data.read.sources import find_source
from finetune.errors import FinetuneError
from finetune.methods.online import Online
from finetune.models.model import load_chat_of
from finetune.models.vocabulary import check_words
from finetune.planner.shapes import published
from finetune.recipe import Batch, Data, Evaluation, LoRA, Model, Optim, Recipe, Saving, Teacher
from finetune.rewards import Reward
from finetune.verification.proofs.fixtures import write_data, write_tokenizer
from finetune.verification.proofs.shrink import fill_zeros, shrink

Kind = Literal["own", "lora", "qlora", "full"]
Format = Literal["messages", "text", "preference", "labelled", "prompts"]

SMALL_BYTES = 16 * 2**20
"""Bytes; models with at most this size are used without shrinking."""
ROWS, EVAL_ROWS, LENGTH = 200, 8, 256
FEWEST_ROWS = 16
COMPLETIONS, COMPLETION_LENGTH = 4, 12
"""Completions per prompt of an online method, and their maximum tokens."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of a proof."""

    processes: int
    steps: int
    own_batch: bool = False
    """Keep the recipe's own rows, micro_rows and max_length."""
    whole: bool = False
    """Prove the recipe's own model, not a shrunk one."""

    @property
    def middle(self) -> int:
        """Step of the checkpoint that other runs resume from."""
        return self.steps // 2


@dataclasses.dataclass(frozen=True)
class Subject:
    """A recipe that this machine can run in seconds, and its differences from the request."""

    recipe: Recipe
    notes: tuple[str, ...]
    data: Prepared
    eos: int | None = None

    @property
    def trained_tokens(self) -> tuple[int, int]:
        """Minimum and maximum trained tokens of a row; uneven rows test how the loss is divided."""
        rows = self.data.train
        counts = [int(rows.row(index)[1].sum()) for index in range(len(rows))]
        return min(counts), max(counts)


def of_kind(recipe: Recipe, kind: Kind) -> Recipe:
    """The recipe unchanged, or changed to LoRA, QLoRA or full fine-tuning."""
    if kind == "own":
        return recipe
    if kind == "full":
        return recipe.with_full_weights()
    stored = "nf4" if kind == "qlora" else "none"
    model = dataclasses.replace(recipe.model, quantization=stored)
    return dataclasses.replace(recipe, model=model, adapter=recipe.adapter or LoRA(r=8))


def make_subject(recipe: Recipe, shape: Shape, folder: Path, cache: Path) -> Subject:
    """Write what the recipe needs to `folder`, and return a recipe that uses it.

    Raises:
        FinetuneError: the data cannot be read, or with `whole` something is not on this machine.
    """
    notes: list[str] = []
    tokenizer = _tokenizer(recipe.model, shape, folder / "tokenizer", notes)
    model = _model(recipe, shape, tokenizer, folder, notes)
    if (folder / "tokenizer").exists():  # a generated tokenizer
        model = dataclasses.replace(model, chat_template=None, chat_template_kwargs={})
    recipe = dataclasses.replace(
        recipe,
        model=model,
        adapter=_adapter(recipe.adapter, shape),
        evaluation=Evaluation(every=shape.middle),
        saving=Saving(every=shape.middle, keep=shape.steps),
        optim=_optim(recipe.optim, notes),
        max_steps=shape.steps,
        trackers=(),
        batch=_batch(recipe.batch, shape, recipe.model),
    )
    recipe = _with_rewards(_with_teacher(recipe, shape, folder, notes), shape, notes)
    recipe = _with_data(recipe, shape, folder, notes)
    if tokenizer.chat_template is None and model.chat_template is None:
        model = dataclasses.replace(model, chat_template="plain")
        recipe = dataclasses.replace(recipe, model=model)
        notes.append("the tokenizer has no chat template: plain is used")
    return _prepared(recipe, tokenizer, cache, notes)


def _prepared(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, cache: Path, notes: list[str]
) -> Subject:
    """Prepare the data once here; its rows are also used to check the result."""
    chat = load_chat_of(recipe, tokenizer)
    found = prepare(recipe, chat, cache)
    if len(found.train) < FEWEST_ROWS and recipe.batch.overlong == "drop":
        recipe = recipe.with_batch(overlong="truncate")
        notes.append(f"nearly all rows are longer than {recipe.batch.max_length}: they are cut")
        found = prepare(recipe, chat, cache)
    subject = Subject(recipe, (), found, tokenizer.eos_token_id)
    fewest, most = subject.trained_tokens
    notes.append(f"{len(found.train)} rows with {fewest} to {most} trained tokens each")
    return dataclasses.replace(subject, notes=tuple(notes))


def _tokenizer(
    model: Model, shape: Shape, folder: Path, notes: list[str]
) -> PreTrainedTokenizerBase:
    name = model.tokenizer or model.name
    try:
        if name is None:
            raise FinetuneError("model.tokenizer: none; name a folder or a hub id")
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
        )
        return check_words(tokenizer)
    except (OSError, ValueError, KeyError) as error:
        if shape.whole:
            raise FinetuneError(
                f"model.tokenizer: '{name}' is not on this machine; --full proves the real model"
            ) from error
    notes.append(f"the tokenizer of {name} is not on this machine: one is trained for the proof")
    if model.chat_template_kwargs:
        notes.append("its template has none of the variables of model.chat_template_kwargs")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


# The model ---------------------------------------------------------------------------------------


def _model(
    recipe: Recipe, shape: Shape, tokenizer: PreTrainedTokenizerBase, folder: Path, notes: list[str]
) -> Model:
    model = recipe.model
    if shape.whole:
        return model
    if model.name is not None and _weight_bytes(Path(model.name)) <= SMALL_BYTES:
        notes.append(f"{model.name} is small: it is used unchanged")
        return dataclasses.replace(
            model, name=str(Path(model.name).resolve()), attention=_attention(model)
        )
    if model.reads:
        raise FinetuneError(
            f"model.name: '{model.name}' reads images, and its tower cannot be shrunk here; prove "
            "it with --full, or name a model of at most 16 MiB"
        )
    config = _config(model, notes)
    fields = shrink(config, len(tokenizer), recipe.batch.max_length)
    for part, given in ((fields, config), (fields.get("text_config"), config.get("text_config"))):
        if isinstance(part, dict) and isinstance(given, dict):
            part |= _special(tokenizer, given)
    home = folder / "model"
    tokenizer.save_pretrained(home)
    common = dataclasses.replace(model, attention=_attention(model), revision=None)
    if model.attention not in ("sdpa", "eager"):
        notes.append(f"attention: sdpa instead of {model.attention}")
    if model.config is not None:
        return dataclasses.replace(common, config=fields, tokenizer=str(home.resolve()))
    torch.manual_seed(recipe.seed)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    fill_zeros(network)
    # As published weights: ZeRO in bf16 trains copies of rounded weights, the others the originals.
    network.to(torch.bfloat16).to(torch.float32).save_pretrained(home)
    return dataclasses.replace(common, name=str(home.resolve()), tokenizer=None)


def _special(tokenizer: PreTrainedTokenizerBase, config: dict[str, Any]) -> dict[str, int | None]:
    """The special tokens of a config; the end token in place of others that its type needs."""
    end = tokenizer.eos_token_id
    own = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    needed = {name for name in own if config.get(name) is not None}
    filled = {
        name: end if token is None and name in needed else token for name, token in own.items()
    }
    return filled | {"eos_token_id": end}


def _with_teacher(recipe: Recipe, shape: Shape, folder: Path, notes: list[str]) -> Recipe:
    """Replace a recipe's teacher, or its stored log-probabilities, by a small model."""
    if not recipe.teaches or shape.whole:
        return recipe
    home = folder / "teacher"
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.tokenizer or recipe.model.name)
    fields = shrink(_config(recipe.model, notes), len(tokenizer), recipe.batch.max_length)
    torch.manual_seed(recipe.seed + 1)
    config = AutoConfig.for_model(**fields)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(home)
    tokenizer.save_pretrained(home)
    notes.append("the teacher has random weights and the student's shrunk architecture")
    changed: Any = recipe  # a method with a `teacher` field
    if changed.teacher_logps is not None:
        notes.append(f"it runs during training, in place of {changed.teacher_logps}")
    return dataclasses.replace(changed, teacher=Teacher(str(home.resolve())), teacher_logps=None)


def _with_rewards(recipe: Recipe, shape: Shape, notes: list[str]) -> Recipe:
    """Use few short completions, and a reward that differs between random completions."""
    if not isinstance(recipe, Online) or shape.whole:
        return recipe
    reward = Reward("finetune.verification.proofs.fixtures:vowels")
    notes.append("completions are rewarded for vowels instead of with the recipe's rewards")
    longest = min(recipe.max_completion_length, COMPLETION_LENGTH)
    given = dataclasses.replace(
        recipe, reward_funcs=(reward,), eval_reward_funcs=(), max_completion_length=longest
    )
    return given if shape.own_batch else dataclasses.replace(given, num_generations=COMPLETIONS)


def _attention(model: Model) -> Literal["sdpa", "eager"]:
    """The recipe's attention if every machine supports it, otherwise sdpa."""
    return "eager" if model.attention == "eager" else "sdpa"


def _weight_bytes(folder: Path) -> float:
    """Bytes of a local folder's weights; infinite if there are none."""
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    return sum(file.stat().st_size for file in files) if files else float("inf")


def _config(model: Model, notes: list[str]) -> dict[str, Any]:
    """The architecture's fields: the recipe's, this machine's, published ones, or a Llama's."""
    if model.config is not None:
        return AutoConfig.for_model(**model.config).to_dict()
    assert model.name is not None
    try:
        return AutoConfig.from_pretrained(
            model.name,
            revision=model.revision or "main",
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
        ).to_dict()
    except (OSError, ValueError):
        known = published.find(model.name)
    if known is not None:
        notes.append(f"{model.name} is not on this machine: its published architecture is used")
        return AutoConfig.for_model(**known).to_dict()
    notes.append(f"{model.name} is not on this machine: a small Llama replaces it")
    return AutoConfig.for_model("llama", tie_word_embeddings=True).to_dict()


def _adapter(adapter: LoRA | None, shape: Shape) -> LoRA | None:
    if adapter is None or shape.whole or not adapter.layers_to_transform:
        return adapter
    kept = tuple(layer for layer in adapter.layers_to_transform if layer < 2)
    return dataclasses.replace(adapter, layers_to_transform=kept)


# Batch, optimizer, data --------------------------------------------------------------------------


def _batch(batch: Batch, shape: Shape, model: Model) -> Batch:
    """Two micro-batches of two rows per process, or the recipe's own batch."""
    if shape.own_batch:
        return batch
    is_uncut = shape.whole or model.reads  # images have their number of tokens
    length = batch.max_length if is_uncut else min(batch.max_length, LENGTH)
    overlong = "drop" if batch.overlong == "error" else batch.overlong
    return dataclasses.replace(
        batch, rows=4 * shape.processes, micro_rows=2, max_length=length, overlong=overlong
    )


def _optim(optim: Optim, notes: list[str]) -> Optim:
    if optim.lr_scaling == "none":
        return optim
    notes.append(
        f"optim.lr_scaling={optim.lr_scaling} depends on the number of processes: it is off"
    )
    return dataclasses.replace(optim, lr_scaling="none")


def _with_data(recipe: Recipe, shape: Shape, folder: Path, notes: list[str]) -> Recipe:
    """Use the first rows of the recipe's training and evaluation data, or generated ones."""
    train, held_out = _local(recipe.data, ROWS), _local(recipe.eval_data, EVAL_ROWS)
    if not train:
        named = ", ".join(data.source for data in recipe.data)
        if shape.whole:
            raise FinetuneError(f"data: {named} is not on this machine; --full takes the real data")
        absent = f"{named} is not on this machine" if recipe.data else "no data is named"
        notes.append(f"{absent}: rows are generated")
        alone: Format = "text" if recipe.method == "pretrain" else "messages"
        kinds: dict[str, Format] = {
            "pairs": "preference", "judged": "preference", "labelled": "labelled",
            "prompts": "prompts",
        }  # fmt: skip
        written = kinds.get(recipe.takes, alone)
        write_data(folder / "rows.jsonl", written, lambda number: _label(recipe, number),
                   images=bool(recipe.model.reads))  # fmt: skip
        rows = str((folder / "rows.jsonl").resolve())
        train, held_out = (Data(rows, written),), ()
    eval_rows = None if held_out else EVAL_ROWS
    return dataclasses.replace(recipe, data=train, eval_data=held_out, eval_rows=eval_rows)


def _label(recipe: Recipe, number: int) -> Any:
    """Label of a generated row, for methods that learn labels."""
    names, kind = recipe.head.names, recipe.head.problem_type
    if kind == "regression":
        return number % 7 / 7
    name = names[number % len(names)]
    return name if kind == "single_label_classification" else [name] * (number % 3 > 0)


def _local(section: Iterable[Data], rows: int) -> tuple[Data, ...]:
    """A section's sources limited to their first rows; empty if one is not on this machine."""
    found: list[Data] = []
    for data in section:
        try:
            if not find_source(data).files:
                return ()
        except FinetuneError:
            return ()
        path = Path(os.path.expanduser(data.source))
        source = str(path.resolve()) if path.exists() else data.source
        first = min(data.first or rows, rows)
        found.append(dataclasses.replace(data, source=source, first=first, repeat=1))
    return tuple(found)
