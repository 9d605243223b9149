"""What rewards read of a completion, and how the spread of their scores is measured."""

import numpy as np
import pytest
from tiny_run import byte_tokenizer

from finetune.inference.generate import new_text
from finetune.inference.sampling import Completion
from finetune.rewards import Reward
from finetune.training.online.sampled import Sampled, metrics


def test_special_tokens_that_a_model_wrote_are_in_the_text():
    tokenizer = byte_tokenizer()
    start, pad = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|pad|>"])
    asked, a, b = (tokenizer.encode(text) for text in ("Hi", "a", "b"))
    new = [*a, start, pad, *b]
    assert new_text(tokenizer, asked, new, special=True) == "a<|im_start|>b"
    assert new_text(tokenizer, asked, new) == "ab"


def test_the_deviation_of_rewards_is_that_of_all_of_a_step():
    """As TRL logs it: not the mean of the groups' deviations, which is 0.7071 here."""
    rewards = np.array([0.0, 1.0, 2.0, 3.0])
    completions = [Completion([5, 6], True, 0.5)] * 4
    sampled = Sampled(np.arange(4) // 2, completions, rewards[None], rewards, rewards)
    assert metrics(sampled, [Reward("json_valid")], 2)["reward_std"] == pytest.approx(1.2909944)
