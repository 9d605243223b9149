"""Score completions with a reward model trained by this toolkit.

It runs in the process of the rewards, which imports torch and loads the model in the first call.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.samples import Completion, Conversation
from finetune.rewards.builtin import text_of

if TYPE_CHECKING:
    from finetune.data.chat.render import Chat

AT_ONCE = 16
"""Sequences per forward pass."""


def reward_model(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    model: str,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Sequence[Any] | None = None,
    **_: Any,
) -> list[float]:
    """The score of each conversation, or text, at its last token.

    Args:
        prompts: Messages or texts.
        completions: Completion of each prompt; its end token is part of the sequence.
        model: Run, or folder with a full model that gives a single score.
        tools: Schemas of the tools of each conversation, or None.
        chat_template_kwargs: Variables of the chat template of each conversation, or None.
    """
    scorer, none = _scorer(model), [None] * len(prompts)
    given = prompts, completions, tools or none, chat_template_kwargs or none
    return scorer([_sequence(*each) for each in zip(*given, strict=True)])


def prepare(model: str) -> None:
    """Load the model before the first call."""
    _scorer(model)


def _sequence(
    prompt: Any, completion: Any, tools: Any, template_kwargs: Any
) -> Conversation | Completion:
    if isinstance(prompt, str):
        return Completion(prompt, text_of(completion))
    answer = {"role": "assistant", "content": text_of(completion)}
    return Conversation(
        (*prompt, answer), tools=tuple(tools or ()), template_kwargs=template_kwargs or {}
    )


@functools.cache
def _scorer(name: str) -> "Scorer":
    import torch  # not at module level: recipes load without torch
    from transformers.utils import logging

    from finetune import catalog
    from finetune.data.chat.render import load_chat
    from finetune.inference.generate import model_of
    from finetune.inference.load import load_tokenizer, load_weights
    from finetune.kernels.score_head import give_scores
    from finetune.recipe import Head
    from finetune.runs.run import Run

    torch.set_num_threads(1) if not torch.cuda.is_available() else None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    run, template, words = Run(Path(name)), None, dict[str, Any]()
    if run.recipe.is_file():
        recipe = catalog.load(run.recipe)
        model, tokenizer, _ = model_of(run, recipe)
        template, words = recipe.model.chat_template, recipe.model.chat_template_kwargs
    else:
        tokenizer, model = load_tokenizer(name), load_weights(name, head=Head(("reward",)))
    network: Any = model.get_base_model() if hasattr(model, "peft_config") else model
    give_scores(network)
    return Scorer(network, load_chat(tokenizer, template, words))


class Scorer:
    """A model with a score head and its chat format."""

    def __init__(self, network: Any, chat: "Chat") -> None:
        self.network, self.chat = network, chat

    def __call__(self, sequences: Sequence[Conversation | Completion]) -> list[float]:
        """The score of each sequence."""
        ids = [self.chat.scored(each).ids for each in sequences]
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
        found = [0.0] * len(ids)
        for start in range(0, len(order), AT_ONCE):
            some = order[start : start + AT_ONCE]
            for number, score in zip(some, self._batch([ids[n] for n in some]), strict=True):
                found[number] = score
        return found

    def _batch(self, rows: list[list[int]]) -> list[float]:
        """Scores of a batch, with padding on the right, which no token attends to."""
        import torch

        longest = max(map(len, rows))
        device = self.network.device
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        ends = torch.tensor([len(row) for row in rows], device=device)
        mask = (torch.arange(longest, device=device) < ends[:, None]).long()
        places = torch.arange(len(rows), device=device) * longest + ends - 1
        with torch.inference_mode():
            scores = self.network(
                input_ids=ids, attention_mask=mask, use_cache=False, places=places
            )
        return scores[:, 0].tolist()
