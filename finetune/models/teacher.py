"""The teacher of a distillation: the same vocabulary as its student, loaded, frozen, inside it."""

import dataclasses
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from finetune.data import taught
from finetune.data.prepare import Prepared
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.kernels.divergence import give_teacher
from finetune.models.load_checks import first_line, is_of_library
from finetune.models.packed_attention import check_layout, layout
from finetune.models.pretrained import compute_dtype, pretrained
from finetune.models.quantization import keep_unpacked
from finetune.models.vocabulary import check_words
from finetune.planner.kernels import LOGITS
from finetune.recipe import Model, Recipe

MOST_NAMED = 3
"""Tokens that a message names."""


@dataclasses.dataclass(frozen=True)
class Role:
    """How messages call two models whose tokenizers are compared."""

    field: str
    first: str
    other: str
    advice: str


TEACHER = Role(
    "teacher.name", "student", "teacher",
    "name a teacher of the same family of tokenizers, or fine-tune on texts that the teacher "
    "writes (method sft)",
)  # fmt: skip
REFERENCE = Role(
    "reference", "trained model", "reference",
    "name a model with the same tokenizer, such as what model.name was trained from",
)  # fmt: skip


def as_student(recipe: Recipe) -> Recipe:
    """A recipe whose model is the teacher, as it is loaded and run."""
    teacher = recipe.taught_by
    assert teacher is not None
    return dataclasses.replace(recipe, model=teacher, adapter=None)


def give(engine: Engine, student: PreTrainedModel, install: Any) -> None:
    """Load the teacher of a recipe, if one runs, and put it into its student.

    Args:
        engine: may partition it while it is loaded.
        student: which has its adapter and its loss.
        install: gives a model the fused operations of the plan.

    Raises:
        FinetuneError: the teacher cannot be loaded, or its head or layout is not known.
    """
    recipe = engine.plan.recipe
    teacher = None
    if recipe.taught_by is not None:
        try:
            teacher = pretrained(engine, as_student(recipe), compute_dtype(engine.plan))
        except FinetuneError as error:
            told = (each.replace("model.name", "teacher.name") for each in error.problems)
            raise FinetuneError(*told) from None
        kind = teacher.config.model_type
        if kind not in LOGITS:
            raise FinetuneError(
                f"teacher.name: what {kind} does between head and loss is not known here; its "
                "log-probabilities can be stored with finetune teach, and named in teacher_logps"
            )
        check_layout(recipe, teacher.config)
        if layout(recipe, student.config).free and not layout(recipe, teacher.config).free:
            raise FinetuneError(
                f"teacher.name: {kind} was not shown to keep documents apart that are side by "
                "side, as its student lays them; set batch.padding_free=false"
            )
        keep_unpacked(teacher)
        install(teacher)
    give_teacher(student, teacher)


def ready(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, data: Prepared) -> Prepared:
    """The rows with what a teacher that is not here said of them; one that runs is looked at.

    Raises:
        FinetuneError: it has another vocabulary, or what is stored is of other rows.
    """
    if recipe.taught_by is not None:
        compare_tokenizer(tokenizer, recipe.taught_by)
        return data
    return data.with_token_columns(taught.read(recipe, data))


def compare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, given: Model, role: Role = TEACHER
) -> None:
    """Refuse a teacher with another tokenizer than its student's, before a model is loaded.

    Args:
        tokenizer: of the student.
        given: the teacher, or another model in this `role`.

    Raises:
        FinetuneError: with the first ids that differ, or there is none.
    """
    try:
        other = AutoTokenizer.from_pretrained(
            given.name, revision=given.revision, trust_remote_code=given.trust_remote_code
        )
        check_words(other)
    except BaseException as error:  # tokenizers has no type for a file that it cannot read
        if not is_of_library(error):
            raise
        raise FinetuneError(
            f"{role.field}: no tokenizer can be loaded from '{given.name}' ({first_line(error)}), "
            "so that its vocabulary cannot be compared; name a folder with tokenizer.json"
        ) from None
    refuse_other_vocabulary(tokenizer, other, str(given.name), role)


def refuse_other_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    name: str,
    role: Role = TEACHER,
) -> None:
    """Refuse a teacher to whom a token id says something else.

    Args:
        tokenizer: of the student.
        other: of the teacher.
        name: of the teacher.
        role: how messages call the two.

    Raises:
        FinetuneError: with the first ids that differ.
    """
    mine, theirs = ({i: t for t, i in each.get_vocab().items()} for each in (tokenizer, other))
    apart = [i for i in sorted(mine.keys() | theirs.keys()) if mine.get(i) != theirs.get(i)]
    if not apart:
        return
    shown = "; ".join(
        f"{i} is {mine.get(i, 'no token')!r} for the {role.first} and "
        f"{theirs.get(i, 'no token')!r} for the {role.other}"
        for i in apart[:MOST_NAMED]
    )
    raise FinetuneError(
        f"{role.field}: '{name}' has another vocabulary: {len(apart):,} of "
        f"{len(mine.keys() | theirs.keys()):,} ids differ ({shown}); {role.advice}"
    )
