"""Next-token training on text: every token of a document and its end token."""

from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass

from finetune.methods.sft import SFT
from finetune.recipe import STRICT

if TYPE_CHECKING:
    from finetune.data.chat.render import Chat, Row
    from finetune.data.formats import Sample


@dataclass(frozen=True, config=STRICT)
class Pretrain(SFT):
    """Train a model, often from scratch, on all of a text."""

    method: ClassVar[str] = "pretrain"

    def encode(self, sample: "Sample", chat: "Chat") -> "Row":
        return chat.render(sample, "all")
