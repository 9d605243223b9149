"""What a model computes from its hidden states."""

from typing import Any

from pydantic.dataclasses import dataclass

from finetune.recipe.field_types import STRICT


@dataclass(frozen=True, config=STRICT)
class Head:
    """What a model computes from its hidden states: next-token logits, or scores of a sequence."""

    names: tuple[str, ...] = ()
    """Names of the scores read at the last token, the values of `id2label` in the exported
    config.json; none for a language model."""
    problem_type: str | None = None
    """`problem_type` of the config, as defined by transformers."""

    @property
    def scored(self) -> bool:
        """Whether it scores sequences."""
        return bool(self.names)

    @property
    def task_type(self) -> str:
        """PEFT's name of the task."""
        return "SEQ_CLS" if self.scored else "CAUSAL_LM"

    @property
    def config(self) -> dict[str, Any]:
        """Fields for the model's config.json, in addition to its own."""
        if not self.scored:
            return {}
        named = dict(enumerate(self.names))
        numbers = {name: number for number, name in named.items()}
        return {"id2label": named, "label2id": numbers, "problem_type": self.problem_type}


LANGUAGE = Head()
"""The head of a language model."""
