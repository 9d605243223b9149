"""Predict memory and time of a run at its start, for comparison with measurements."""

import contextlib
import dataclasses
from typing import Any

from finetune.errors import FinetuneError
from finetune.planner.estimate import advice, memory, timing, traffic
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.judges import Judge, judges
from finetune.planner.estimate.moments import Moment
from finetune.planner.estimate.predict import model_source, workload_of
from finetune.planner.estimate.sampling_cost import Sampling, sampling
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a run knows about its data and machine before the first step."""

    length: int
    """Tokens of the longest row; if it has several documents, per document. A prompt that they
    share counts once."""
    padded: bool
    """Whether rows of a micro-batch are padded."""
    labelled: int
    """Maximum number of tokens with a label in a micro-batch."""
    slots: float
    """Average number of token slots per step, over all processes; a shared prompt counts once."""
    document: float
    """Average number of tokens per document, for the cost of attention."""
    cpu: bool
    chained: bool
    """Whether pointwise operations are compiled from C."""
    apart: bool
    """Whether each document attends in a separate call."""
    scored: int
    """Tokens of the longest document if attention uses matrix products on a CPU; else 0."""
    repeated: float = 1.0
    """Average tokens in attention for each slot; more than 1 if documents share prompts."""
    repeated_in_longest: float = 1.0
    """The same for the row with `length` tokens."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Predicted peak memory and times of a run on its machine."""

    workload: Workload
    facts: Facts
    machine: Machine | None
    """None if the machine's speed is unknown; only memory is then predicted."""
    steps: int
    sampling: Sampling | None = None
    """Memory and time of sampling, for online methods."""
    judges: tuple[Judge, ...] = ()
    """Reward models, in processes next to rank 0."""

    @property
    def peak_memory(self) -> int:
        """Bytes of one process at the peak of the largest micro-batch."""
        return round(memory.timeline(self.workload).training.peak.total)

    def peaks(
        self,
        rows: int,
        length: int,
        padded: bool,
        labelled: int,
        longest: int,
        repeated: float = 1.0,
        images: int = 0,
    ) -> list[Moment]:
        """The peak of each stage for micro-batches with `rows` rows of `length` tokens.

        `longest` is the length of the longest document in tokens; 0 if rows are padded. `repeated`
        is the number of tokens in attention for each of `rows x length`, and `images` the bytes of
        the images.
        """
        scored = longest if self.workload.scored else 0
        workload = dataclasses.replace(
            self.workload, rows=rows, scored=scored, repeated=max(1.0, repeated),
            image_bytes=images,
        )  # fmt: skip
        workload = _with_length(workload, length, padded, labelled)
        return [found.training.peak for found in memory.by_stage(workload)]

    def of_ranks(self, peaks: list[Moment]) -> list[int]:
        """Peak bytes of each process, by rank; stages are the outermost axis."""
        each = self.workload.layout.processes // len(peaks)
        return [round(peak.total) for peak in peaks for _ in range(each)]

    def summary(self) -> dict[str, Any]:
        """Bytes and seconds for `plan.json`, with the same names as the measured values."""
        timeline = memory.timeline(self.workload).training
        found: dict[str, Any] = {
            "peak_memory": round(timeline.peak.total),
            "moment": timeline.peak.name,
            "length": self.workload.length,
        }
        layout, rows = self.workload.layout, self.workload.rows * self.workload.accumulation
        mean = max(1, round(self.facts.slots / (rows * layout.data)))  # tokens of a row
        moved = advice.volume(dataclasses.replace(self.workload, length=mean))
        if layout.processes > 1:
            sent = dict(traffic.by_axis(moved))
            found |= {"layers": self.workload.shape.layers, "sent": sent}
        if self.machine is not None:
            each = self.facts.slots / self.workload.layout.processes
            document = self.facts.document * self.facts.repeated
            times = timing.times(self.workload, self.machine, moved, each, document)
            found |= {
                "step_seconds": times.step,
                "tokens_per_second": times.tokens_per_second * self.facts.repeated,
                "seconds": times.step * self.steps,
                "machine": self.machine.gpu.name,
                "flops_per_second": self.machine.gpu.flops,
                "reached": times.reached,
            }
        if self.judges:
            found["reward_models"] = {each.name: round(each.memory) for each in self.judges}
        return found if self.sampling is None else found | self.sampling.summary()


def forecast(plan: Plan, steps: int, facts: Facts, machine: Machine | None) -> Forecast | None:
    """The forecast for a plan; None if the formulas do not cover the model or its adapter."""
    try:
        workload = workload_of(plan, model_source(plan.recipe).shape)
    except FinetuneError:
        return None
    workload = dataclasses.replace(
        workload,
        cpu=facts.cpu,
        chained=facts.chained,
        apart=facts.apart,
        # Soft-capped scores, as of Gemma 2, are materialized.
        scored=0 if workload.shape.capped_scores else facts.scored,
        repeated=facts.repeated_in_longest,
    )  # fmt: skip
    workload = _with_length(workload, facts.length, facts.padded, facts.labelled)
    sampled = sampling(workload, machine)
    found = list[Judge]()
    with contextlib.suppress(FinetuneError):  # the formulas do not cover the model
        found = judges(plan.recipe, facts.cpu, facts.length)
    return Forecast(workload, facts, machine, steps, sampled, tuple(found))


def _with_length(workload: Workload, length: int, padded: bool, labelled: int) -> Workload:
    """The workload with rows of `length` tokens; padded rows need an attention mask."""
    attention = workload.attention
    if attention != "eager":
        attention = "masked" if padded else "flash"
    share = min(1.0, labelled / (workload.rows * length))
    return dataclasses.replace(workload, length=length, attention=attention, labelled=share)
