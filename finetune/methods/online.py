"""Common parts of online methods: fields for sampling and rewards, and statistics of groups."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.pairs import completed_by, optim_of
from finetune.recipe import STRICT, Completions, Kind, Optim, Positive, Recipe, Text
from finetune.recipe.references import BASE, START, reference_of
from finetune.rewards import REWARDS, Rewards, names
from finetune.rewards.functions import is_model

if TYPE_CHECKING:
    import numpy as np
    import torch

    from finetune.data.chat.render import Chat
    from finetune.data.rows.collate import MicroBatch
    from finetune.data.rows.example import Example
    from finetune.data.rows.store import Rows
    from finetune.data.samples import Sample
    from finetune.methods.losses import Sum

DEFAULTS: dict[str, Any] = {"lr": 1e-6, "schedule": "constant", "warmup": 0}
"""Defaults of `optim`, as in TRL."""
HIGH_LR = {"adapter": 1e-4, "all weights": 5e-6}
"""Learning rates above which models of common sizes break."""
FEW_COMPLETIONS = 32
"""Completions per step below which the gradient is mostly noise."""
OLD, REFERENCE, SAMPLER, ADVANTAGE = "old", "reference", "sampler", "advantage"
"""Columns of a batch: log-probabilities of tokens by the old policy, by the reference, and by vLLM
if it sampled them; advantages of completions."""
MEAN_RATIO = "sampling/importance_sampling_ratio/mean"
LARGEST_RATIO = "sampling/importance_sampling_ratio/max"
"""Metrics of the weights of tokens that vLLM sampled; names as in TRL."""


def _reads_base(init: bool | str) -> bool:
    """Whether `adapter.init_lora_weights` initializes from the base weights, and changes them."""
    return isinstance(init, str) and init != "gaussian"


@dataclass(frozen=True, config=STRICT)
class Online(Recipe):
    """Learn from completions that the model samples during training.

    `batch.rows` counts completions, as in TRL: `num_generations` per prompt.
    """

    takes: ClassVar[Kind] = "prompts"
    unit: ClassVar[str] = "completions"
    extremes: ClassVar[tuple[str, ...]] = (LARGEST_RATIO,)
    encoding_fields: ClassVar[tuple[str, ...] | None] = ()

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    reward_funcs: Rewards = ()
    """Reward functions: names, `module:function`, or sections with a weight."""
    eval_reward_funcs: Rewards = ()
    """Reward functions for greedy completions of held-out prompts; by default `reward_funcs`."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt, which are compared with one another."""
    max_completion_length: Positive = 256
    """Maximum tokens of a completion; `batch.max_length` covers prompt and completion together."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divisor of the logits, both for sampling completions and in the loss."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Total probability of the most likely tokens that are sampled from."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of most likely tokens that are sampled from; 0 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least probability of a token that is sampled, as a share of the largest."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divisor of the logits of tokens that occurred, of negative ones a factor; 1 for none."""
    num_iterations: Positive = 1
    """Passes over the completions of one sampling, each of `steps_per_generation` steps."""
    steps_per_generation: Positive = 1
    """Number of steps whose completions are sampled together."""
    mask_truncated_completions: bool = False
    """Exclude completions that reached `max_completion_length` from the loss."""
    sampling_rows: Positive = 64
    """Completions that a device samples at a time, limited by memory."""
    reward_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Maximum seconds of a reward function for the completions of one sampling."""
    on_reward_error: Literal["stop", "skip"] = "stop"
    """On a failed reward: stop the run, or leave the completions without a score."""
    vllm_server_base_url: Text | None = None
    """URL of a running `vllm serve` that samples the completions; null samples in this process."""
    vllm_server_timeout: Annotated[float, Field(gt=0)] = 240.0
    """Maximum seconds of a request to vLLM."""
    vllm_importance_sampling_clip_max: Annotated[float, Field(ge=1)] = 3.0
    """Largest weight of a token that vLLM sampled, or sampled from fewer tokens: its probability in
    training / in sampling."""

    @property
    def encoded_length(self) -> int:
        return self.batch.max_length - self.max_completion_length

    @property
    def loss_temperature(self) -> float:
        return self.temperature

    @property
    def sampled(self) -> Completions:
        return Completions(
            self.batch.rows * self.steps_per_generation,
            self.sampling_rows,
            self.max_completion_length,
            self.num_generations,
            self.updates,
            elsewhere=self.vllm_server_base_url is not None,
        )

    @property
    def chooses(self) -> dict[str, float]:
        """Fields of a `Row` that change the distribution of which it samples, if there are any.

        A token is then weighted by its probability in training / in sampling.
        """
        names = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value != names[name]}

    @property
    def reward_models(self) -> tuple[tuple[str, ...], ...]:
        """Folders of the reward models for training, and of those for evaluation.

        Each of the two groups is loaded in its own process.
        """
        return tuple(
            tuple(dict.fromkeys(each.function for each in rewards if is_model(each)))
            for rewards in (self.reward_funcs, self.eval_reward_funcs)
        )

    @property
    def evaluated_rewards(self) -> tuple[str, ...]:
        return tuple(names(self.eval_reward_funcs or self.reward_funcs))

    @property
    def rows_per_sample(self) -> int:
        return self.num_generations * self.num_iterations

    @property
    def updates(self) -> int:
        """Optimizer steps on the completions of one sampling."""
        return self.num_iterations * self.steps_per_generation

    @property
    def prompts_per_step(self) -> int:
        """Prompts per step."""
        return self.batch.rows // self.num_generations

    @property
    def resamplings(self) -> int:
        """Times to sample other prompts in place of those whose completions got equal rewards."""
        return 0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the rewards use log-probabilities of a reference."""
        return False

    @property
    def always_active(self) -> bool:
        """Whether a completion without advantage has a gradient too."""
        return False

    @property
    def penalty(self) -> float:
        """Factor of log(policy / reference), which is subtracted from a completion's reward."""
        return 0.0

    @property
    def needs_second_model(self) -> bool:
        """Whether the reference is a second model; not if it is the base under a new adapter."""
        adapter, asked = self.adapter, reference_of(self)
        if not self.needs_reference or adapter is None or asked not in (START, BASE):
            return self.needs_reference
        reads_base = _reads_base(adapter.init_lora_weights)
        return reads_base or (self.model.adapter is not None and asked == START)

    def problems(self) -> list[str]:
        found: list[str] = []
        if not self.reward_funcs:
            found.append(
                f"reward_funcs: none; name what scores completions: {', '.join(REWARDS)}, or "
                "module:function of your own"
            )
        if self.batch.rows % self.num_generations:
            below = self.batch.rows - self.batch.rows % self.num_generations
            choices = [str(n) for n in (below, below + self.num_generations) if n]
            found.append(
                f"batch.rows: {self.batch.rows} completions are not whole groups of "
                f"num_generations={self.num_generations}; use batch.rows={' or '.join(choices)}"
            )
        if self.encoded_length < 1:
            found.append(
                f"batch.max_length: {self.batch.max_length} tokens for prompt and completion leave "
                f"none for the prompt; it must exceed max_completion_length="
                f"{self.max_completion_length}"
            )
        if self.adapter is not None and self.adapter.dropout:
            found.append(
                "adapter.dropout: completions are sampled without it, so that ratios of policies "
                "would be noise; set it to 0"
            )
        return found + self._vllm_problems()

    def _vllm_problems(self) -> list[str]:
        """Reasons why a vLLM server cannot sample from the model that is trained."""
        if self.vllm_server_base_url is None:
            return []
        found: list[str] = []
        if not self.vllm_server_base_url.startswith(("http://", "https://")):
            found.append(
                f"got '{self.vllm_server_base_url}', expected a URL such as http://localhost:8000"
            )
        adapter = self.adapter
        if self.chooses:
            found.append(f"its log-probabilities are without {', '.join(self.chooses)}; leave out")
        if adapter is None:
            found.append(
                "all weights are trained, and a running server reloads only adapters; set "
                "adapter, or leave this field out"
            )
        elif adapter.use_dora:
            found.append("vLLM does not support adapter.use_dora; set it to false")
        if adapter is not None and adapter.modules_to_save:
            found.append("vLLM does not support adapter.modules_to_save; remove it")
        if adapter is not None and _reads_base(adapter.init_lora_weights):
            found.append(
                f"adapter.init_lora_weights={adapter.init_lora_weights} changes the base, which "
                "the server does not; use true"
            )
        if self.model.quantization != "none":
            found.append(
                f"model.quantization={self.model.quantization}: the server has the base without "
                "it; use none"
            )
        return [f"vllm_server_base_url: {each}" for each in found]

    def advice(self) -> list[str]:
        notes: list[str] = []
        kind = "all weights" if self.adapter is None else "adapter"
        if self.optim.lr > HIGH_LR[kind]:
            notes.append(
                f"optim.lr: {self.optim.lr:g} is high for an online method ({kind}: usually at "
                f"most {HIGH_LR[kind]:g}); watch entropy, and rewards other than the one that is "
                "trained (eval_reward_funcs)"
            )
        if self.batch.rows < FEW_COMPLETIONS:
            notes.append(
                f"batch.rows: {self.batch.rows} completions a step are few; 64 and more are usual"
            )
        return notes

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        from finetune.data.chat.render import Row
        from finetune.data.prompts import columns_as_json
        from finetune.data.rows.example import Example
        from finetune.data.samples import Conversation, Prompt

        assert isinstance(sample, Prompt)
        if isinstance(sample.asked, Conversation):
            row = chat.prompt_row(sample.asked)
        else:
            ids = chat.prompt(sample.asked)
            row = Row(ids, [False] * len(ids))
        return Example((row,), beside=columns_as_json(sample))

    def count(self, batch: "MicroBatch") -> int:
        return batch.rows

    def terms(self, rows: "Rows", chosen: "np.ndarray") -> int:
        return len(chosen)

    def ratios(self, rows: "Rows", chosen: "np.ndarray") -> int:
        """Number of policy ratios in the chosen rows: the denominator of clip ratios."""
        return len(chosen)

    def advantages(self, rewards: "np.ndarray") -> "np.ndarray":
        """Advantage of each completion, 0 if it has no score.  # (groups, generations) fp64

        Args:
            rewards: (groups, generations) fp64, all groups of a sampling; NaN for no score.
        """
        raise NotImplementedError


def group_means(rewards: "np.ndarray") -> "np.ndarray":
    """Mean reward of the scored completions of each group, 0 if there are none.  # (groups, 1)"""
    import numpy as np

    scored = np.isfinite(rewards)
    sums = np.where(scored, rewards, 0.0).sum(axis=1, keepdims=True)
    return sums / np.maximum(scored.sum(axis=1, keepdims=True), 1)


def group_stds(rewards: "np.ndarray") -> "np.ndarray":
    """Sample standard deviation of each group, 0 for fewer than two scores.  # (groups, 1)"""
    import numpy as np

    scored = np.isfinite(rewards)
    squares = np.where(scored, (rewards - group_means(rewards)) ** 2, 0.0)
    numbers = scored.sum(axis=1, keepdims=True)
    return np.sqrt(squares.sum(axis=1, keepdims=True) / np.maximum(numbers - 1, 1))


def sums_of_completions(values: "torch.Tensor", lengths: "torch.Tensor") -> "torch.Tensor":
    """Sums over the tokens of each completion, (completions,) fp32.

    Args:
        values: (tokens,) fp32, all completions in order.
        lengths: (completions,) int64.
    """
    import torch

    if not len(values):  # torch 2.13 does not reduce an empty tensor
        return values.sum() + torch.zeros(len(lengths), device=values.device)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def importance_weights(
    old: "torch.Tensor", batch: "MicroBatch", largest: float
) -> "tuple[torch.Tensor | None, dict[str, Sum], dict[str, torch.Tensor]]":
    """Weights min(exp(old - sampler), largest) of tokens that another policy sampled, and metrics.

    That is vLLM, or the model with fewer tokens or a penalty (`Online.chooses`).

    They correct for the difference between the policies that sample and that are trained (truncated
    importance sampling, Ionides 2008), and have no gradient. None if both are the same.

    Args:
        old: (tokens,) fp32, log-probabilities of the old policy, as training computes them.
        batch: has the sampler's log-probabilities.
        largest: upper limit of a weight.
    """
    import math

    sampler = batch.token_columns.get(SAMPLER)
    if sampler is None:
        return None, {}, {}
    weights = (old.detach() - sampler).clamp(max=math.log(largest)).exp()
    seen = weights if len(weights) else weights.new_zeros(1)
    return weights, {MEAN_RATIO: (weights.sum(), len(weights))}, {LARGEST_RATIO: seen.max()}


def clip_ratios(below: "torch.Tensor", above: "torch.Tensor") -> "dict[str, Sum]":
    """Share of the terms whose ratio is clipped; names as in TRL."""
    sums = {"low_mean": below, "high_mean": above, "region_mean": below | above}
    return {f"clip_ratio/{name}": (each.sum(), len(each)) for name, each in sums.items()}
