"""Prepare the rows of a run on rank 0, then read them on every rank."""

from finetune.cache import cache
from finetune.data.audit import mistakes
from finetune.data.chat.render import Chat
from finetune.data.prepare import Prepared, prepare
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.recipe import Recipe


def prepare_on_ranks(engine: Engine, recipe: Recipe, chat: Chat) -> Prepared:
    """Rows of a recipe's data, the same on every rank.

    Raises:
        FinetuneError: on every rank, with problems of the data, or if a rank reads different data.
    """
    folder = cache("data")
    with engine.patient():
        counts = engine.on_rank_0(lambda: prepare(recipe, chat, folder).counts)
        # Check once on each machine, which may have its own disk.
        check = engine.accelerator.is_local_main_process and not engine.is_main
        prepared = prepare(recipe, chat, folder, check=check)
        engine.sums_and_maxima([], [len(prepared.train)])
    if prepared.counts != counts:
        raise FinetuneError(f"rank {engine.rank} reads different data than rank 0")
    problems = list(mistakes(counts["train"]))
    if problems and recipe.data_checks == "refuse":
        raise FinetuneError(*problems)
    return prepared
