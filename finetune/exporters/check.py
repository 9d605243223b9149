"""Compare the prompts, logits and answers of an export with those of the trained model."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from finetune.data.chat.chat_templates import text_of_chat
from finetune.data.chat.render import Chat, Row
from finetune.data.formats import read_row
from finetune.data.images.inputs import ImageInputs
from finetune.data.read.sources import find_source
from finetune.data.samples import (
    Completion,
    Conversation,
    Sample,
    as_kind,
    sequences_of,
    with_files_in,
)
from finetune.data.samples import Prompt as Unanswered
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError, TrainingFailure
from finetune.exporters.base_tensors import base_files, weight_files
from finetune.exporters.source import Source, is_loadable
from finetune.inference.generate import Loaded, continue_ids, load, load_folder, text_of
from finetune.recipe import Recipe
from finetune.reports.card import Kind
from finetune.runs import limits

Prompt = Conversation | Completion

CHECK_ROWS = 8
"""Default number of rows of a run on which an export is checked."""
PLACES = 32
"""Number of tokens at the end of a prompt whose logits are compared."""
ANSWER = 24
"""Maximum number of tokens of a compared answer."""
TOLERANCE = 0.05
"""Maximum difference of logits, relative to the largest logit, for an export without quantization.

Rounding a merge to bf16 gives about 1e-3, and a lost adapter or head 0.2 and more.
"""


@dataclasses.dataclass(frozen=True)
class Checked:
    """Comparison of an export with the trained model."""

    rows: int
    prompts_equal: int
    """Rows whose prompt has the same token ids in plain transformers as in training."""
    logits: float
    """Maximum difference, relative to the largest logit."""
    kl: float
    """Maximum KL divergence over tokens, KL(trained || exported) in nats."""
    answers_equal: int
    """Rows with the same greedy answer."""
    loss: float | None = None
    """Mean loss of the export on the trained tokens of these rows; None without trained tokens."""
    trained_loss: float | None = None
    """Mean loss of the trained model on the same tokens."""
    offer: str | None = None
    """Suggestion of an export that is closer to the trained model."""


def check(source: Source, folder: Path, kind: Kind, rows: int) -> Checked | str:
    """Compare an export with the trained model on rows of the run's held-out or training data.

    Args:
        rows: Maximum number of rows.

    Returns:
        The comparison, or the reason why there is none.

    Raises:
        TrainingFailure: prompts have other token ids, or logits differ by more than rounding.
    """
    if source.generation is None:
        return "it outputs scores, not token logits"
    if kind == "gguf":
        return "GGUF files are not loaded for a check"
    if not is_loadable(folder):
        return "it is not a folder that transformers or PEFT loads"
    if source.base is not None and kind == "adapter":
        return f"its base {source.base} (--base) is not loaded for a check"
    if source.recipe.model.trust_remote_code:
        return "custom code of a model is not run for a check"
    samples = list(_samples(source.recipe, rows))
    asked = [prompt for prompt, _ in samples]
    if not asked:
        return "the run's data has no readable prompts on this machine"
    needed, free = _bytes_needed(source), limits.memory().available
    if needed > free:
        return (
            f"loading it needs about {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} are free"
        )
    trained = load(source.run, source.step)
    chat, inputs = trained.chat(), trained.images
    rows_asked = [_fitting(trained, _asked(chat, prompt)) for prompt in asked]
    wanted, answers = _logits(trained, rows_asked, inputs), _answers(trained, rows_asked)
    learned = [
        row
        for _, sample in samples
        if (row := _row(source.recipe, sample, chat, trained.context)) is not None
    ]
    trained_loss = _loss(trained, learned, inputs)
    del trained
    exported = load_folder(folder, source.dtype)
    found = _logits(exported, rows_asked, inputs)
    copied = exported.chat()
    pairs = list(zip(found, wanted, strict=True))
    checked = Checked(
        rows=len(asked),
        prompts_equal=sum(
            _plain_ids(folder, copied, prompt) == chat.prompt(prompt) for prompt in asked
        ),
        logits=max(_difference(*pair) for pair in pairs),
        kl=max(_divergence(*pair) for pair in pairs),
        answers_equal=sum(
            one == other for one, other in zip(_answers(exported, rows_asked), answers, strict=True)
        ),
        loss=_loss(exported, learned, inputs),
        trained_loss=trained_loss,
        offer=_offer(source, kind),
    )
    exact = kind != "nf4" and source.recipe.model.quantization == "none"
    if checked.prompts_equal < checked.rows:
        raise TrainingFailure(
            f"{folder.name}: {checked.rows - checked.prompts_equal} of {checked.rows} prompts have "
            "different token ids than in training"
        )
    if exact and not checked.logits <= TOLERANCE:
        raise TrainingFailure(
            f"{folder.name}: its logits differ from the trained model's by {checked.logits:.1e} of "
            f"the largest (rounding gives less than {TOLERANCE})"
        )
    return checked


def check_lines(checked: Checked | Mapping[str, Any] | str) -> list[str]:
    """Text for a comparison, from `check` or from `export.json`."""
    if isinstance(checked, Mapping):
        checked = Checked(**checked)
    if isinstance(checked, str):
        return [f"It was not compared with the trained model: {checked}."]
    lines = [
        f"Compared with the trained model on {checked.rows} rows of its run:",
        f"- {checked.prompts_equal} prompts have the same token ids in plain transformers as in "
        "training;",
        f"- logits differ by at most {checked.logits:.1e} of the largest, distributions by "
        f"{checked.kl:.1e} nats (KL);",
        f"- {checked.answers_equal} greedy answers of up to {ANSWER} tokens are equal"
        + ("." if checked.loss is None else ";"),
    ]
    if checked.loss is not None:
        lines.append(
            f"- the loss of their answers is {checked.loss:.4f}, and {checked.trained_loss:.4f} in "
            "the trained model."
        )
    return lines if checked.offer is None else [*lines, checked.offer]


def _offer(source: Source, kind: Kind) -> str | None:
    stored = source.recipe.model.quantization
    if source.adapter is None or stored != "nf4" or kind != "merged" or source.merge_into:
        return None
    return (
        "The adapter was trained on NF4 weights but merged into the weights before quantization; "
        "`--merge-into nf4` merges it into the weights that it was trained on."
    )


def prompts(recipe: Recipe, rows: int) -> Iterator[Prompt]:
    """Prompts from every source that is available on this machine, in turn."""
    return (prompt for prompt, _ in _samples(recipe, rows))


def _samples(recipe: Recipe, rows: int) -> Iterator[tuple[Prompt, Sample]]:
    """Samples with their prompts, from every source in turn."""
    sources = recipe.eval_data or recipe.data
    for data in sources:
        share = -(-rows // len(sources))
        try:
            for row in find_source(data).rows():
                if share < 1:
                    break
                found = _prompt(data.format, row.value, Path(row.file).parent)
                if found is not None:
                    share -= 1
                    yield found
        except FinetuneError:  # the source is not available
            continue


def _prompt(data_format: str, value: Any, folder: Path) -> tuple[Prompt, Sample] | None:
    try:
        sample = with_files_in(read_row(data_format, value), folder)
    except RowProblem:
        return None
    asked = sequences_of(sample)[0]
    if isinstance(asked, Completion) or isinstance(sample, Unanswered):
        return asked, sample
    if not isinstance(asked, Conversation) or len(asked.messages) < 2:
        return None
    if asked.messages[-1]["role"] != "assistant":
        return None
    return dataclasses.replace(asked, messages=asked.messages[:-1]), sample


def _row(recipe: Recipe, sample: Sample, chat: Chat, context: int | None) -> Row | None:
    """The tokens of a sample, or of the chosen answer of a pair; None without trained tokens."""
    learned = as_kind(sample, recipe.takes)
    if not learned:
        return None
    try:
        row = recipe.encode(learned[0], chat).sequences[0]
    except (RowProblem, FinetuneError):
        return None
    if row.images and context is not None and len(row.ids) > context:
        return None
    cut = Row(row.ids[:context], row.trained[:context], images=row.images)
    return cut if any(cut.trained[1:]) else None


def _asked(chat: Chat, prompt: Prompt) -> Row:
    if isinstance(prompt, Conversation):
        return chat.prompt_row(prompt)
    ids = chat.prompt(prompt)
    return Row(ids, [False] * len(ids))


def _fitting(loaded: Loaded, row: Row) -> Row:
    """The end of a prompt that leaves room for an answer in the context; images are not cut."""
    if loaded.context is None or row.images:
        return row
    start = -max(1, loaded.context - ANSWER)
    return Row(row.ids[start:], row.trained[start:])


def _plain_ids(folder: Path, chat: Chat, prompt: Prompt) -> list[int]:
    """Token ids of a prompt in plain transformers with the exported tokenizer."""
    if chat.images is not None:  # its processor expands images
        return chat.prompt(prompt)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt_text(tokenizer, prompt), add_special_tokens=False)["input_ids"]
    if isinstance(prompt, Conversation):
        return ids
    start = tokenizer("")["input_ids"][:1]
    return (start if start == [tokenizer.bos_token_id] else []) + ids


def prompt_text(tokenizer: Any, prompt: Prompt) -> str:
    """The text of a prompt; conversations are rendered with the tokenizer's own chat template."""
    if isinstance(prompt, Completion):
        return prompt.prompt
    kwargs = prompt.template_kwargs
    return text_of_chat(tokenizer, prompt.messages, prompt.tools, None, kwargs, header=True)


@torch.inference_mode()
def _logits(loaded: Loaded, rows: list[Row], inputs: ImageInputs | None) -> list[torch.Tensor]:
    """Logits of the last tokens of each prompt, (PLACES or fewer, vocabulary)."""
    model: Any = loaded.model
    return [
        model(**_given(model, row, inputs), use_cache=False).logits[0, -PLACES:].float().cpu()
        for row in rows
    ]


def _given(model: Any, row: Row, inputs: ImageInputs | None) -> dict[str, torch.Tensor]:
    """Inputs of a row, with those of its images if the model reads images."""
    images = {} if inputs is None else inputs.of_row(row.ids, row.images)
    given = {"input_ids": torch.tensor([row.ids]), **images}
    return {name: value.to(model.device) for name, value in given.items()}


@torch.inference_mode()
def _loss(loaded: Loaded, rows: list[Row], inputs: ImageInputs | None) -> float | None:
    """Mean loss over the trained tokens of all rows, in nats; None without rows."""
    model: Any = loaded.model
    losses = list[torch.Tensor]()
    for row in rows:
        given = _given(model, row, inputs)
        ids = given["input_ids"]
        scores = model(**given, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        each = -scores.gather(-1, ids[0, 1:, None])[:, 0]
        losses.append(each[torch.tensor(row.trained[1:], device=model.device)].cpu())
    return torch.cat(losses).mean().item() if losses else None


def _answers(loaded: Loaded, rows: list[Row]) -> list[str]:
    return [text_of(loaded, row) for row in continue_ids(loaded, rows, max_new_tokens=ANSWER)]


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def _divergence(found: torch.Tensor, wanted: torch.Tensor) -> float:
    exact, other = wanted.log_softmax(-1), found.log_softmax(-1)
    return (exact.exp() * (exact - other)).sum(-1).max().item()


def _bytes_needed(source: Source) -> int:
    """Memory of the base in fp32, as it is loaded on a CPU, plus 25% for activations."""
    whole = source.checkpoint / "model"
    files = weight_files([whole]) if whole.is_dir() else base_files(source.recipe)
    stored = sum(path.stat().st_size for path in files)
    return int(1.25 * stored * torch.float32.itemsize / source.stored_dtype.itemsize)
