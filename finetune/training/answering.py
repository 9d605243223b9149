"""Generate answers to held-out rows during training, on the sharded model, and score them.

Every rank runs the same number of forward passes, because forward passes of sharded weights are
collective: an answer that has ended is fed padding until the last answer of all ranks has ended.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from peft import PeftModel

from finetune.data.chat.render import Chat
from finetune.data.order import of_rank, split_rows
from finetune.data.prepare import Prepared
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.evaluation.answers import Answer, prompt_of
from finetune.evaluation.metrics.metric import Metric, Settings, choose
from finetune.evaluation.questions import Asked, left_out_of, of_recipe, spread
from finetune.inference.generate import new_text, turn
from finetune.models.load_checks import context_length
from finetune.models.packed_attention import DOCUMENTS


@dataclasses.dataclass(frozen=True)
class Answering:
    """The rows to answer at every evaluation, and the metrics of their answers."""

    asked: list[Asked]
    prompts: list[list[int]]
    metrics: Mapping[str, Metric]
    chat: Chat
    pad: int
    max_new_tokens: int
    micro_rows: int

    def measure(self, engine: Engine) -> dict[str, float]:
        """All values of the metrics, on every rank."""
        mine = self._answers(engine)
        every = [pair for rank in engine.gather(mine) for pair in rank]
        return engine.on_rank_0(lambda: self._measured(dict(every)))

    def _measured(self, answers: dict[int, Answer]) -> dict[str, float]:
        rows = [(each, (answers[number],)) for number, each in enumerate(self.asked)]
        found = [m for metric in self.metrics.values() for m in metric.measure(rows, Settings())]
        stopped = sum(not each.cut for each in answers.values()) / len(answers)
        return {each.name: each.total for each in found} | {"stopped": stopped}

    def _answers(self, engine: Engine) -> list[tuple[int, Answer]]:
        """Greedy answers to this rank's share of the rows, each with its row number."""
        engine.model.eval()
        lengths = np.array([len(prompt) for prompt in self.prompts])
        cuts = split_rows(np.arange(len(self.prompts)), lengths, self.micro_rows)
        found = list[tuple[int, Answer]]()
        with answering_attention(engine.module), torch.no_grad():
            for _, chosen in of_rank(cuts, engine.data_rank, engine.data_world):
                found += self._batch(engine, [int(number) for number in chosen])
        engine.reshard()
        return found

    def _batch(self, engine: Engine, numbers: list[int]) -> list[tuple[int, Answer]]:
        prompts = [self.prompts[number] for number in numbers] or [[self.pad]]
        new, rooms = greedy(engine, prompts, self.pad, self.chat.stop_ids, self.max_new_tokens)
        if not numbers:
            return []
        return [
            (number, self._answer(number, ids, len(ids) >= room))
            for number, ids, room in zip(numbers, new, rooms, strict=True)
        ]

    def _answer(self, number: int, ids: list[int], cut_off: bool) -> Answer:
        tokenizer = self.chat.tokenizer
        text = new_text(tokenizer, self.prompts[number], ids).strip()
        scaffold = turn(tokenizer).scaffold.strip() if self.chat.template is not None else ""
        return Answer(text.removeprefix(scaffold).strip(), cut_off, len(ids))


def answering(engine: Engine, data: Prepared, chat: Chat, pad: int) -> Answering | None:
    """Choose the rows and check that the metrics fit them; None if the recipe has no metrics.

    Raises:
        FinetuneError: the rows are plain texts, or a metric does not fit a row.
    """
    recipe = engine.plan.recipe
    chosen = recipe.evaluation
    if not chosen.metrics:
        return None
    with engine.patient():  # files may be large
        asked = engine.on_rank_0(lambda: of_recipe(recipe, left_out_of(data)))
    if any(each.is_text for each in asked):
        raise FinetuneError("evaluation.metrics: the held-out rows are texts, which have no answer")
    rows = spread(asked, chosen.metric_rows)
    try:
        metrics = choose(chosen.metrics, rows, Settings())
    except FinetuneError as error:
        problems = (each.replace("--metrics", "evaluation.metrics") for each in error.problems)
        raise FinetuneError(*problems) from None
    prompts = [prompt_of(chat, each.question) for each in rows]
    return Answering(
        rows,
        prompts,
        metrics,
        chat,
        pad,
        chosen.max_new_tokens,
        chosen.micro_rows or recipe.batch.micro_rows,
    )


def greedy(
    engine: Engine, prompts: list[list[int]], pad: int, stops: Sequence[int], max_new_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """New tokens of each prompt without the stop token, and the limit of each prompt.

    Runs one forward pass per token, with a key-value cache, until all answers on all ranks ended.
    """
    device, longest = engine.device, max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device
    )  # (rows, longest)
    context = context_length(_network(engine.module).config)
    rooms = [
        max_new_tokens if context is None else max(0, min(max_new_tokens, context - len(p)))
        for p in prompts
    ]
    ends = torch.tensor(list(stops), device=device)
    new = [list[int]() for _ in prompts]
    going = [room > 0 for room in rooms]
    cache: Any = None
    while engine.largest([int(any(going))])[0]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if context is not None:
            positions = positions.clamp(max=context - 1)  # for rows that have ended
        out: Any = engine.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        ids = out.logits[:, -1].argmax(-1, keepdim=True)  # (rows, 1)
        stopped = torch.isin(ids, ends)[:, 0].tolist()
        for row, token in enumerate(ids[:, 0].tolist()):
            going[row] = going[row] and not stopped[row]
            if going[row]:
                new[row].append(token)
                going[row] = len(new[row]) < rooms[row]
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return new, rooms


@contextlib.contextmanager
def answering_attention(module: torch.nn.Module) -> Iterator[None]:
    """Use SDPA in this context: padding-free attention supports neither cache nor padding."""
    network = _network(module)
    usual = network.config._attn_implementation
    if usual != DOCUMENTS:
        yield
        return
    network.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        network.set_attn_implementation(usual)


def _network(module: torch.nn.Module) -> Any:
    return module.get_base_model() if isinstance(module, PeftModel) else module
