"""Two methods as a user would write them in a module of their own."""

from typing import ClassVar

from pydantic.dataclasses import dataclass

from finetune.methods.sft import SFT
from finetune.recipe import STRICT, Head, Model, Recipe


@dataclass(frozen=True, config=STRICT)
class Contrastive(Recipe):
    """Embeddings by InfoNCE (arXiv:1807.03748): each answer against all answers of the step."""

    document_names: ClassVar[tuple[str, ...]] = ("question", "answer")
    passes_before_step: ClassVar[int] = 1
    unit: ClassVar[str] = "questions"
    encoding_fields: ClassVar[tuple[str, ...] | None] = ()
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    dimensions: int = 8
    temperature: float = 0.1

    @property
    def head(self):
        return Head(tuple(f"dimension {number}" for number in range(self.dimensions)))

    def encode(self, sample, chat):
        from finetune.data.rows.example import Example
        from finetune.data.samples import Text

        texts = (sample.prompt, sample.completion)
        return Example(tuple(chat.scored(Text(text)) for text in texts), scored=True)

    def count(self, batch):
        return len(batch.last_places) // 2

    def terms(self, rows, chosen):
        return len(chosen)

    def before_step(self, passes):
        return passes.of_rows(vectors)

    def loss(self, model, batch):
        import torch
        from torch.nn.functional import cross_entropy, normalize

        from finetune.methods.losses import Loss

        own = vectors(model, batch)
        # This micro-batch's vectors have a gradient among those of the step: the gradient of all
        # losses of the step in them is then exact, and each micro-batch counts its own losses.
        every = batch.of_step.index_copy(0, batch.in_step, own)
        questions, answers = normalize(every, dim=-1).view(-1, 2, self.dimensions).unbind(1)
        near = questions @ answers.T / self.temperature
        right = torch.arange(len(near), device=near.device)
        losses = cross_entropy(near, right, reduction="none")
        mine = batch.in_step[::2] // 2
        total = losses.sum() - losses.sum().detach() + losses[mine].sum().detach()
        hits = (near.argmax(-1) == right)[mine].sum()
        return Loss(total, {"accuracy": (hits, len(mine))})


def vectors(model, batch):
    from finetune.methods.losses import sequence_scores

    return sequence_scores(model, batch)


@dataclass(frozen=True, config=STRICT)
class Weighted(SFT):
    """Each answer weighs as much as another model, the judge, finds it likely, per token."""

    judge: str = ""

    def before_training(self, passes):
        import numpy as np

        from finetune.training.passes import logps

        def per_token(model, batch):
            return logps(model, batch) / batch.document_labels.clamp(min=1)

        with passes.other(Model(name=self.judge)):
            return {"likely": np.exp(passes.of_documents(per_token))}

    def loss(self, model, batch):
        from finetune.methods.losses import Loss, sequence_logps

        each, balance = sequence_logps(model, batch)
        return Loss(-(each * batch.columns["likely"]).sum().float(), balance=balance)
