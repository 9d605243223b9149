"""Next-token training on text, with a loss on every token including the end-of-text token."""

from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass

from finetune.methods.sft import SFT
from finetune.recipe import STRICT

if TYPE_CHECKING:
    from finetune.data.chat.render import Chat
    from finetune.data.rows.example import Example
    from finetune.data.samples import Sample


@dataclass(frozen=True, config=STRICT)
class Pretrain(SFT):
    """Train on all tokens of a text, often from scratch."""

    method: ClassVar[str] = "pretrain"

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        from finetune.data.rows.example import Example

        return Example((chat.render(sample, "all"),))
