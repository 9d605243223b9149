"""Make the rows of an online method's steps: sample completions, score them, compute advantages.

Each rank samples completions for its share of the prompts. The completions are gathered on all
ranks, rank 0 scores them with one call of each reward function, and every rank trains on its share
of the step's micro-batches. The prompts of a step and the sampling noise depend only on the seed
and the step.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.checkpoints.stop_tokens import all_ends, network_of
from finetune.data.rows.collate import MicroBatch, collate
from finetune.data.rows.order import of_rank, rows_of_step, split_rows
from finetune.data.rows.store import Rows, TokenColumn, labelled_places
from finetune.distributed.base import Engine
from finetune.inference.decoder import Row
from finetune.inference.sampling import Completion, sample
from finetune.methods.losses import Sum, token_logps
from finetune.methods.online import ADVANTAGE, OLD, REFERENCE, SAMPLER, Online
from finetune.models.shell import blank
from finetune.recipe.references import other_model
from finetune.rewards.builtin import text_of
from finetune.rewards.functions import check_columns
from finetune.rewards.process import RewardProcess
from finetune.runs.run import Run
from finetune.training.loop import EvalResult, StepRows, micro_batches
from finetune.training.memory_meter import counting
from finetune.training.online import sampled as records
from finetune.training.online.reward_columns import column_names, reward_columns
from finetune.training.online.sampled import Sampled, Scored, Watch, penalised
from finetune.training.online.vllm_server import CHECKED, ServerFailure, VLLMServer

RESAMPLED = 2**32
"""Added to the seed for the order of the prompts that replace others."""
LOGGED = 2
"""Prompts per sampling whose completions are logged for the report."""


class Rollouts:
    """Provides the rows of each step of a run from samplings; every rank makes the same calls."""

    def __init__(
        self,
        engine: Engine,
        run: Run,
        train: Rows,
        tokenizer: PreTrainedTokenizerBase,
        pad_id: int,
        reference: nn.Module | None = None,
    ) -> None:
        """`reference` is a second model, needed if the policy's base is not the reference."""
        recipe = engine.plan.recipe
        assert isinstance(recipe, Online)
        self.engine, self.run, self.train, self.recipe = engine, run, train, recipe
        self.tokenizer, self.pad_id, self.reference = tokenizer, pad_id, reference
        self.rewards = RewardProcess(recipe.reward_funcs, recipe.reward_timeout)
        self.eval_rewards = self.rewards
        if recipe.eval_reward_funcs:
            self.eval_rewards = RewardProcess(recipe.eval_reward_funcs, recipe.reward_timeout)
        self.columns = column_names(train)
        check_columns((*recipe.reward_funcs, *recipe.eval_reward_funcs), self.columns)
        network = cast(Any, network_of(engine.module))
        ends = all_ends(network.generation_config.eos_token_id, tokenizer.eos_token_id)
        self.stops = tuple(ends)
        self.blank = blank(engine)
        self.server = None
        if recipe.sampled.elsewhere:
            self.server = VLLMServer(
                recipe, run.rollouts, engine.plan.backend.precision, self.stops
            )
            engine.on_rank_0(self.server.check)
        self.watch, self.warnings = Watch(), list[str]()
        self._memory: int | None = None
        """Peak bytes of new tensors in the first sampling, maximum over processes."""
        self._held: tuple[int, Sampled, Rows, dict[str, float]] | None = None

    def close(self) -> None:
        if self.server is not None and self.engine.is_main:
            self.server.close()
        self.rewards.close()
        self.eval_rewards.close()

    # Steps -------------------------------------------------------------------------------------

    def take(self, step: int) -> StepRows:
        """This rank's rows of a step; samples with the current model if a new sampling starts."""
        recipe, engine = self.recipe, self.engine
        number, within = divmod(step, recipe.updates)
        if self._held is None:
            kept = number * recipe.updates + (within > 0)
            engine.on_rank_0(lambda: records.forget_after(self.run.completions, kept))
        if self._held is None or self._held[0] != number:
            self._held = (number, *self._sampling(number, resumes=within > 0))
        _, sampled, rows, found = self._held
        first = within % recipe.steps_per_generation * recipe.batch.rows
        chosen = np.arange(first, first + recipe.batch.rows)
        active = self._active(rows, chosen)
        mine = micro_batches(engine, rows, active) if len(active) else [(0, active)]
        prompts = sampled.prompts
        batches = [collate(rows, some, self.pad_id, engine.device) for _, some in mine]
        return StepRows(
            batches=engine.local_batches(batches, self.pad_id),
            numbers=[number for number, _ in mine],
            chosen=prompts[chosen],
            mine=[prompts[some] for _, some in mine],
            terms=recipe.terms(rows, chosen),
            trained_tokens=int(rows.labelled[chosen].sum()),
            real_tokens=int(rows.lengths[active].sum()),
            metrics=found,
            passed_over=self._passed_over(rows, np.setdiff1d(chosen, active)),
        )

    def _active(self, rows: Rows, chosen: np.ndarray) -> np.ndarray:
        """Rows with a gradient: those with a non-zero advantage, or all with a KL or entropy term.

        A pipeline computes all rows.
        """
        if self.engine.plan.mesh.pipeline > 1:
            return chosen  # so that each stage has a micro-batch
        counted = rows.labelled[chosen] > 0
        if not self.recipe.always_active:
            counted &= rows.columns[ADVANTAGE][chosen] != 0
        return chosen[counted]

    def _passed_over(self, rows: Rows, left: np.ndarray) -> dict[str, Sum]:
        ratios = self.recipe.ratios(rows, left) if self.engine.is_main else 0
        zero = torch.zeros((), device=self.engine.device)
        names = [name for name in self.recipe.metrics if name.startswith("clip_ratio/")]
        return dict.fromkeys(names, (zero, ratios))

    def _sampling(self, number: int, resumes: bool) -> tuple[Sampled, Rows, dict[str, float]]:
        """Make sampling `number`, or read it back if the run resumes in the middle of it."""
        recipe, step = self.recipe, number * self.recipe.updates
        path = self.run.rollouts / f"step-{step:08d}.npz"
        started = time.perf_counter()
        if resumes:
            sampled, of_tokens = self.engine.on_rank_0(lambda: records.read(path))
        else:
            sampled = self._sample(number)
            of_tokens = dict[str, np.ndarray]()
        seconds = time.perf_counter() - started
        rows = sampled.rows(self.train, recipe)
        if not resumes:
            of_tokens = self._token_logps(rows)
            if self.server is not None or recipe.chooses:
                of_tokens[SAMPLER] = records.sampler_logps(sampled, rows)
            if recipe.penalty:
                sampled = penalised(sampled, recipe, rows, of_tokens)
                rows = sampled.rows(self.train, recipe)
            if recipe.updates > 1:
                self.engine.on_rank_0(lambda: self._keep(path, sampled, of_tokens))
        rows = _with_tokens(rows, of_tokens)
        found = records.metrics(sampled, recipe.reward_funcs, recipe.num_generations)
        if not resumes:
            self.warnings += self.watch.warnings(found)
            tokens = sum(len(each.ids) for each in sampled.completions)
            found["sampling/tokens_per_second"] = tokens / seconds
            if self._held is None:
                found["sampling/memory"] = float(self._memory or 0)
            self.engine.on_rank_0(lambda: self._log(step, sampled))
        return sampled, rows, found

    def _keep(self, path: Any, sampled: Sampled, of_tokens: dict[str, np.ndarray]) -> None:
        """Write a sampling and delete samplings older than the oldest checkpoint needs."""
        records.write(path, sampled, of_tokens)
        steps = [int(each.name[5:]) for each in self.run.checkpoints.glob("step-*[0-9]")]
        oldest = min(steps, default=0) - self.recipe.updates
        for each in self.run.rollouts.glob("step-*.npz"):
            if int(each.stem[5:]) < oldest:
                each.unlink()

    def _sample(self, number: int) -> Sampled:
        """The groups of a sampling; those without spread are replaced up to `resamplings` times.

        Other prompts come in an order of their own, as many as a sampling has at a time; the first
        ones with spread take the places of groups without.
        """
        recipe, each = self.recipe, self.recipe.num_generations
        count = recipe.prompts_per_step * recipe.steps_per_generation
        chosen = rows_of_step(number, len(self.train), count, recipe.seed)
        found, asked = self._groups(number, chosen, []), chosen.tolist()
        for turn in range(recipe.resamplings):
            if found.spread(each).all():
                break
            order = number * recipe.resamplings + turn
            chosen = rows_of_step(order, len(self.train), count, recipe.seed + RESAMPLED)
            found.replace_flat(self._groups(number, chosen, asked), each)
            asked += chosen.tolist()
        advantages = recipe.advantages(found.rewards.reshape(-1, each)).ravel()
        return Sampled(*found, advantages)

    def _groups(self, number: int, chosen: np.ndarray, asked: Sequence[int]) -> Scored:
        """Groups of the chosen rows, with other noise than earlier groups of the rows `asked`."""
        recipe, each = self.recipe, self.recipe.num_generations
        rows, prompts = [*asked, *chosen.tolist()], np.repeat(chosen, each)
        before = [rows[:at].count(rows[at]) for at in range(len(asked), len(rows))]
        numbers = (each * np.array(before)[:, None] + np.arange(each)).ravel()
        step = number * recipe.updates
        completions = self._complete(self.train, prompts, numbers, step, recipe.temperature)
        scores = self._scored(self.rewards, self.train, prompts, completions)
        return Scored(prompts, completions, scores, records.total(scores, recipe.reward_funcs))

    # Sampling and scoring ----------------------------------------------------------------------

    def _complete(
        self, rows: Rows, prompts: np.ndarray, numbers: np.ndarray, step: int, temperature: float
    ) -> list[Completion]:
        """One completion per prompt, on every rank; each rank samples a share of the prompts.

        Every rank has complete weights here, also if the model is divided.
        """
        engine = self.engine
        order = {row: at for at, row in enumerate(dict.fromkeys(prompts.tolist()))}
        mine = [
            index
            for index, row in enumerate(prompts.tolist())
            if order[row] % engine.world == engine.rank
        ]
        limit, stops = self.recipe.max_completion_length, self.stops
        chooses: dict[str, Any] = self.recipe.chooses if temperature else {}
        names = {i: (int(prompts[i]), int(numbers[i])) for i in mine}
        wanted = [
            Row(
                self._prompt(rows, name[0]),
                limit,
                stops,
                temperature,
                name=name,
                **chooses,
                images=rows.documents.images_of(int(rows.members[name[0]])),
            )
            for name in names.values()
        ]
        if self.server is not None:
            found = self._ask_server(self.server, wanted, step)
        else:
            found = self._run_sampler(wanted, step)
        made = dict[int, Completion]()
        for indices, completions in engine.gather((mine, found)):
            made |= zip(indices, completions, strict=True)
        return [made[index] for index in range(len(prompts))]

    def _run_sampler(self, wanted: list[Row], step: int) -> list[Completion]:
        """Completions by this process's model."""
        engine, recipe = self.engine, self.recipe
        measures = self._memory is None
        measured = counting(engine.device) if measures else contextlib.nullcontext([0])
        with contextlib.ExitStack() as inside:
            # Weights that are gathered into another model are a part of what sampling needs.
            apart = self.blank is not None
            counted = inside.enter_context(measured) if apart else [0]
            model = inside.enter_context(engine.gathered(self.blank))
            counted = counted if apart else inside.enter_context(measured)
            found = sample(
                model, wanted, self.pad_id, recipe.sampling_rows, recipe.seed, step,
                self.train.image_inputs,
            )  # fmt: skip
        if measures:
            self._memory = engine.largest(counted)[0]
        return found

    def _ask_server(self, server: VLLMServer, wanted: list[Row], step: int) -> list[Completion]:
        """Completions by a vLLM server, which first gets the adapter."""
        engine = self.engine
        with engine.gathered(self.blank) as model:
            server.name = engine.on_rank_0(lambda: server.publish(model))
            prompts = [self._prompt(self.train, row) for row in range(len(self.train))[:CHECKED]]
            engine.on_rank_0(lambda: server.compare_if_due(model, prompts))
        found, failed = list[Completion](), None
        try:
            found = server(wanted, self.recipe.seed, step) if wanted else []
        except ServerFailure as error:
            failed = error
        for each in engine.gather(failed):
            if each is not None:  # on every rank
                raise each
        return found

    def _prompt(self, rows: Rows, row: int) -> list[int]:
        return rows.documents.document(int(rows.members[row]))[0].tolist()

    def _scored(
        self,
        process: RewardProcess,
        rows: Rows,
        prompts: np.ndarray,
        completions: Sequence[Completion],
    ) -> np.ndarray:
        """Scores of each reward function, NaN for no score.  # (rewards, completions) fp64"""
        columns = self._columns(rows, prompts, completions)
        skip = self.recipe.on_reward_error == "skip"
        scores, failed = self.engine.on_rank_0(lambda: process.score(columns, skip))
        self.warnings += failed
        return np.array(scores, dtype=np.float64)

    def _columns(
        self, rows: Rows, prompts: np.ndarray, completions: Sequence[Completion]
    ) -> dict[str, list[Any]]:
        """`reward_columns` for this tokenizer and these columns."""
        return reward_columns(self.tokenizer, self.columns, rows, prompts, completions)

    def _log(self, step: int, sampled: Sampled) -> None:
        """Log the completions of the first prompts."""
        shown = slice(0, LOGGED * self.recipe.num_generations)
        completions = sampled.completions[shown]
        columns = self._columns(self.train, sampled.prompts[shown], completions)
        names = records.names(self.recipe.reward_funcs)
        values = zip(
            columns["prompts"], columns["completions"], sampled.rewards[shown].tolist(),
            sampled.advantages[shown].tolist(), sampled.scores[:, shown].T.tolist(), completions,
            strict=True,
        )  # fmt: skip
        lines = [
            {
                "prompt": text_of(asked),
                "completion": text_of(completion_text),
                "reward": records.finite(reward),
                "advantage": advantage,
                "rewards": dict(zip(names, map(records.finite, scores), strict=True)),
                "tokens": len(each.ids),
                "ended": each.ended,
            }
            for asked, completion_text, reward, advantage, scores, each in values
        ]
        records.log(self.run.completions, step, lines)

    # Log-probabilities that stay fixed while the policy is updated -------------------------------

    def _token_logps(self, rows: Rows) -> dict[str, np.ndarray]:
        """Log-probabilities of every trained token, 0 elsewhere, by name: `OLD`, `REFERENCE`."""
        found: dict[str, np.ndarray] = {}
        if self.recipe.updates > 1 or self.recipe.penalty:
            found[OLD] = self._logps(rows, self.engine.model)
        if self.recipe.needs_reference:
            with _as_reference(self.engine) if self.reference is None else contextlib.nullcontext():
                found[REFERENCE] = self._logps(rows, self.reference or self.engine.model)
        return found

    def _logps(self, rows: Rows, model: nn.Module) -> np.ndarray:
        """Log-probabilities by the policy, or by a second model.  # (tokens,) fp32"""
        engine = self.engine
        with contextlib.nullcontext() if model is engine.model else engine.running(model):
            found = self._local_logps(rows, model)
        engine.reshard()
        whole = np.zeros(len(rows.documents.ids), dtype=np.float32)
        for at, logps in engine.gather(found):
            whole[at] = logps
        return whole

    @torch.no_grad()
    def _local_logps(self, rows: Rows, model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
        """The log-probabilities that this process computes, and their places in the rows."""
        engine, batch = self.engine, self.recipe.batch
        if model is self.reference and other_model(self.recipe) is not None:
            rows = dataclasses.replace(rows, share_prompts=False)
        cuts = split_rows(
            np.arange(len(rows)), rows.slots, batch.micro_rows, batch.micro_tokens,
            rows.side_by_side, rows.prompts,
        )  # fmt: skip
        places, values = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        model.eval()
        # Equally many batches on every rank, because forward passes are collective.
        for _, some in of_rank(cuts, engine.data_rank, engine.data_world):
            collated = collate(rows, some, self.pad_id, engine.device)
            (part,) = engine.local_batches([collated], self.pad_id)

            def forward(
                _: int, model: nn.Module, part: MicroBatch = part, some: np.ndarray = some
            ) -> torch.Tensor:
                logps, _ = token_logps(model, part)
                places.append(labelled_places(rows.documents, some))
                values.append(logps.float().cpu().numpy())
                return logps.sum()

            engine.forward_only(part, forward)
        return np.concatenate(places), np.concatenate(values)

    # Evaluation --------------------------------------------------------------------------------

    def evaluate(self, rows: Rows) -> EvalResult:
        """Score greedy completions of held-out prompts; the loss is minus the mean reward."""
        started, recipe = time.perf_counter(), self.recipe
        rewards = recipe.eval_reward_funcs or recipe.reward_funcs
        prompts = np.arange(len(rows))
        completions = self._complete(rows, prompts, np.zeros_like(prompts), 0, 0.0)
        scores = self._scored(self.eval_rewards, rows, prompts, completions)
        reward = records.total(scores, rewards)
        found = {"reward": records.mean(reward)}
        self.warnings += self.watch.warnings_of_evaluation(found["reward"])
        found |= records.lengths(completions)
        del found["entropy"]
        for name, each in zip(records.names(rewards), scores, strict=True):
            found[f"rewards/{name}/mean"] = records.mean(each)
        return EvalResult(
            loss=-found["reward"],
            tokens=len(rows),
            seconds=time.perf_counter() - started,
            metrics={name: value for name, value in found.items() if np.isfinite(value)},
        )


def rollouts_of(
    engine: Engine,
    run: Run,
    train: Rows,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    reference: nn.Module | None,
) -> Rollouts | None:
    """The rollouts of an online method; None for any other method."""
    if not isinstance(engine.plan.recipe, Online):
        return None
    return Rollouts(engine, run, train, tokenizer, pad_id, reference)


@contextlib.contextmanager
def _as_reference(engine: Engine) -> Iterator[None]:
    """Disable the model's adapter inside this context."""
    module = engine.module
    assert isinstance(module, PeftModel)
    with module.disable_adapter():
        yield


def _with_tokens(rows: Rows, of_tokens: Mapping[str, np.ndarray]) -> Rows:
    columns = {name: TokenColumn.at_labels(rows.documents, v) for name, v in of_tokens.items()}
    return dataclasses.replace(rows, token_columns=columns)
