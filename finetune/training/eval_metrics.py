"""Generate answers to held-out rows during training, on the sharded model, and score them.

Forward passes of sharded weights are collective, so every rank decodes until the last answer of all
ranks has ended.
"""

import dataclasses
from collections.abc import Mapping

from finetune.checkpoints.stop_tokens import network_of
from finetune.data.chat.render import Chat
from finetune.data.chat.tokens import Row as Prompt
from finetune.data.images.inputs import ImageInputs
from finetune.data.prepare import Prepared
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.evaluation.generations import Answer, answers_of, prompt_of
from finetune.evaluation.metrics.metric import Metric, Settings, choose
from finetune.evaluation.questions import Asked, left_out_of, of_recipe, spread
from finetune.inference.decoder import Row, decode
from finetune.models.load_checks import context_length


@dataclasses.dataclass(frozen=True)
class Answering:
    """The rows to answer at every evaluation, and the metrics of their answers."""

    asked: list[Asked]
    prompts: list[Prompt]
    metrics: Mapping[str, Metric]
    chat: Chat
    pad: int
    max_new_tokens: int
    micro_rows: int
    images: ImageInputs | None

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
        context = context_length(network_of(engine.module).config)
        stops, rows = self.chat.stop_ids, dict[int, Row]()
        for number in range(engine.data_rank, len(self.prompts), engine.data_world):
            prompt = self.prompts[number]
            left = self.max_new_tokens if context is None else context - len(prompt.ids)
            limit = min(self.max_new_tokens, left)
            rows[number] = Row(prompt.ids, limit, stops, images=prompt.images)
        engine.model.eval()
        decode(
            engine.module, list(rows.values()), self.pad, self.micro_rows, engine=engine,
            inputs=self.images,
        )  # fmt: skip
        engine.reshard()
        return list(zip(rows, answers_of(self.chat, list(rows.values())), strict=True))


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
        data.eval.image_inputs,
    )
