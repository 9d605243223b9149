"""Load the teacher of a distillation into its student, after comparing their vocabularies."""

import dataclasses
import re
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from finetune.data.prepare import Prepared
from finetune.data.rows import teacher_store
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError, is_of_library, reading
from finetune.kernels.divergence import give_teacher
from finetune.models.network import compute_dtype, pretrained
from finetune.models.packed_attention import layout, refuse_other_layout
from finetune.models.quantization import keep_unpacked
from finetune.models.vocabulary import check_words, rows_needed
from finetune.planner.families import family_of
from finetune.recipe import Model, Recipe

MOST_NAMED = 3
"""Maximum number of tokens that a message names."""


@dataclasses.dataclass(frozen=True)
class Role:
    """Names for messages about two models whose tokenizers are compared."""

    field: str
    first: str
    other: str
    advice: str


TEACHER = Role(
    "teacher.name", "student", "teacher",
    "name a teacher with the same family of tokenizers, or fine-tune on texts that the teacher "
    "writes (method sft)",
)  # fmt: skip
REFERENCE = Role(
    "reference", "trained model", "reference",
    "name a model with the same tokenizer, such as what model.name was trained from",
)  # fmt: skip


def as_student(recipe: Recipe) -> Recipe:
    """The recipe with its teacher as the model, to load and run it."""
    teacher = recipe.taught_by
    assert teacher is not None
    return dataclasses.replace(recipe, model=teacher, adapter=None)


def give(engine: Engine, student: PreTrainedModel, install: Any) -> None:
    """Load the teacher of a recipe, if it runs during training, and attach it to its student.

    Args:
        engine: Engine, which may partition the teacher while it is loaded.
        student: Model that has its adapter and its loss.
        install: Function that installs the plan's fused kernels in a model.

    Raises:
        FinetuneError: the teacher cannot be loaded, or its head or row layout is not supported.
    """
    recipe = engine.plan.recipe
    teacher = None
    if recipe.taught_by is not None:
        try:
            teacher = pretrained(engine, as_student(recipe), compute_dtype(engine.plan))
        except FinetuneError as error:
            problems = (
                re.sub(r"\bmodel\.(name|pickle)\b", r"teacher.\1", e) for e in error.problems
            )
            raise FinetuneError(*problems) from None
        kind = teacher.config.model_type
        if family_of(kind).logits is None:
            raise FinetuneError(
                f"teacher.name: how {kind} scales and caps logits is not known here; store its "
                "log-probabilities with finetune teach, and name them in teacher_logps"
            )
        free = layout(recipe, student.config).free
        refuse_other_layout("teacher.name", recipe, teacher.config, free)
        keep_unpacked(teacher)
        install(teacher)
    give_teacher(student, teacher)


def ready(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, data: Prepared) -> Prepared:
    """Add the log-probabilities of a stored teacher to the rows, or check a running teacher.

    Raises:
        FinetuneError: the teacher has another vocabulary, or the stored values are for other rows.
    """
    if recipe.taught_by is not None:
        compare_tokenizer(tokenizer, recipe.taught_by)
        refuse_tokens_without_rows(recipe.taught_by, data)
        return data
    return data.with_token_columns(teacher_store.read(recipe, data, rows_needed(tokenizer)))


def compare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, given: Model, role: Role = TEACHER
) -> None:
    """Refuse a teacher whose tokenizer differs from its student's, before a model is loaded.

    Args:
        tokenizer: Tokenizer of the student.
        given: The teacher, or another model in this `role`.
        role: Names of the two models for messages.

    Raises:
        FinetuneError: with the first ids that differ, or no tokenizer can be loaded.
    """
    instead = "its vocabulary cannot be compared: name a folder with tokenizer.json"
    with reading(f"{role.field}: no tokenizer can be loaded from '{given.name}'", instead):
        other = AutoTokenizer.from_pretrained(
            given.name, revision=given.revision, trust_remote_code=given.trust_remote_code
        )
        check_words(other)
    refuse_other_vocabulary(tokenizer, other, str(given.name), role)


def refuse_tokens_without_rows(given: Model, data: Prepared, role: Role = TEACHER) -> None:
    """Refuse another model whose embedding has no row for a token of the data.

    Raises:
        FinetuneError: with the token and the number of rows.
    """
    try:
        config = AutoConfig.from_pretrained(
            given.name, revision=given.revision, trust_remote_code=given.trust_remote_code
        )
    except Exception as error:
        if not is_of_library(error):
            raise
        return  # loading the model reports it
    rows = getattr(config.get_text_config(), "vocab_size", None)
    splits = [each.documents.ids for each in (data.train, data.eval) if len(each)]
    highest = max((int(ids.max()) for ids in splits), default=-1)
    if isinstance(rows, int) and highest >= rows:
        raise FinetuneError(
            f"{role.field}: the data has token {highest}, but the embedding of '{given.name}' has "
            f"{rows} rows; {role.advice}"
        )


def refuse_other_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    name: str,
    role: Role = TEACHER,
) -> None:
    """Refuse a teacher for which token ids mean something else.

    Args:
        tokenizer: Tokenizer of the student.
        other: Tokenizer of the teacher.
        name: Name of the teacher.
        role: Names of the two models for messages.

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
