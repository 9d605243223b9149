"""Run one process of a training: start it, train, and handle every way it can end."""

import contextlib
import dataclasses
import datetime
import os
import signal
from pathlib import Path

from accelerate.state import AcceleratorState
from transformers.utils import logging as transformers_logging

from finetune import backend as backends
from finetune.checkpoints.copies import stored
from finetune.checkpoints.lock import locked
from finetune.checkpoints.resume import Resume, card, finished
from finetune.checks.request import check_here
from finetune.distributed.base import Engine
from finetune.distributed.build import build
from finetune.distributed.heartbeat import Heartbeat
from finetune.errors import FinetuneError, Interrupted, TrainingFailure
from finetune.exporters.publish import describe
from finetune.kernels import cpu
from finetune.models.load_checks import is_out_of_memory
from finetune.planner import Plan
from finetune.planner.estimate.forecast import Forecast
from finetune.process import rendezvous
from finetune.process.error_report import report
from finetune.process.loopback import listen_on_loopback
from finetune.process.signals import Interruption
from finetune.recipe import Recipe
from finetune.runs.addresses import is_address
from finetune.runs.run import Run
from finetune.training.out_of_memory import out_of_memory
from finetune.training.recorder import Recorder
from finetune.training.run_options import Options
from finetune.training.stages import read, start
from finetune.training.steps import Training


def train(
    recipe: Recipe,
    backend: str | None = None,
    precision: backends.Precision | None = None,
    output: str | Path | None = None,
    resume: Resume = False,
    options: Options | None = None,
) -> Run:
    """Train in this process, or as one of the processes that `accelerate launch` started.

    With `resume`, a run that is already complete is returned unchanged.

    Raises:
        FinetuneError: the request cannot be honoured; nothing was changed.
        TrainingFailure: training started and could not continue.
        Interrupted: by SIGTERM, SIGINT or SIGHUP; the progress is saved.
    """
    options = options or Options(output or "runs/latest", resume)
    return carry_out(check_here(recipe, backend, precision), options)


def carry_out(plan: Plan, options: Options) -> Run:
    """`train` for a request that was checked in this process."""
    if is_address(options.output) and rendezvous.world() > 1:
        raise FinetuneError(
            f"--output {options.output}: one process copies for all of them; use finetune launch"
        )
    with stored(options.output, options.resume) as folder:
        return _carry_out(plan, dataclasses.replace(options, output=folder))


def _carry_out(plan: Plan, options: Options) -> Run:
    listen_on_loopback()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    run = Run(Path(options.output))
    nvme = options.nvme_path or run.root / "offload"
    if options.resume and finished(run, plan):
        if rendezvous.rank() == 0:
            finish(run, options.plot)
        return run
    try:
        timeout = datetime.timedelta(minutes=options.timeout_minutes)
        with Interruption() as interruption:
            engine = build(plan, nvme, timeout)
            return Worker(engine, run, options, interruption).train()
    finally:
        # A notebook or a script may train again with another plan, or do something else.
        cpu.use_pool(False)
        cpu.release()
        AcceleratorState._reset_state(reset_partial_state=True)


def finish(run: Run, plot: bool) -> None:
    """Report that a run is complete; first write the files missing after a late kill."""
    if not card(run).is_file():
        with locked(run):
            describe(run, plot)
    print(f"{run.root}: complete, nothing to resume", flush=True)


class Worker:
    """A training, and how it handles a signal, a lost rank and running out of memory."""

    def __init__(
        self,
        engine: Engine,
        run: Run,
        options: Options,
        interruption: Interruption | None = None,
        steps: type[Training] = Training,
    ) -> None:
        self.engine, self.run, self.options, self.steps = engine, run, options, steps
        self.interruption = interruption or Interruption()  # not entered: handles no signals
        self.heartbeat = self._heartbeat()

    def train(self) -> Run:
        """Train to the end and return the run."""
        engine, run, options = self.engine, self.run, self.options
        forecast: Forecast | None = None
        with contextlib.ExitStack() as held:
            self.heartbeat.start()
            try:
                self._print_notes()
                inputs = read(engine, run, options, held)
                recorder = Recorder(engine, run, inputs.data, inputs.steps, inputs.stream)
                forecast = recorder.forecast
                started = start(engine, run, options, inputs, recorder)
                steps = self.steps(engine, run, options, self.interruption, self.heartbeat, started)
                steps.train()
            except Interrupted:
                if not self.interruption.deferring:  # torch's agent ends surviving ranks this way
                    lost = self.heartbeat.lost_local_rank()
                    if lost is not None:
                        raise lost from None
                self.heartbeat.stop()
                engine.close()
                raise
            except FinetuneError:
                raise
            except Exception as error:  # collectives raise many types when another rank is lost
                self.interruption.defer()
                if is_out_of_memory(error):
                    raise self._out_of_memory(error, forecast) from None
                explained = self.heartbeat.explain(error)
                if explained is None:
                    raise
                raise explained from None
            finally:
                self.heartbeat.stop()
        engine.close()
        return run

    def _print_notes(self) -> None:
        """Print what is known of the device before the model is loaded."""
        if self.engine.is_main:
            for note in self.engine.notes:
                print(f"note: {note}", flush=True)
        self.engine.notes.clear()

    def _out_of_memory(self, error: Exception, forecast: Forecast | None) -> TrainingFailure:
        engine, step = self.engine, self.heartbeat.step
        failure = out_of_memory(
            error, engine.plan, engine.rank, engine.device, forecast, step, self.run.standing()
        )
        self.heartbeat.report_failure(str(failure))
        return failure

    def _heartbeat(self) -> Heartbeat:
        def lost(error: TrainingFailure) -> None:
            os._exit(report(error))  # the main thread may wait forever for the lost rank

        return Heartbeat(
            self.engine,
            rendezvous.meeting_point(),
            rendezvous.launcher(),
            dumps=self.run.flight_records,
            on_orphan=self._end_as_orphan,
            on_loss=lost,
            standing=self.run.standing,
        )

    def _end_as_orphan(self) -> None:
        if not self.interruption.asked:  # otherwise it is already ending
            os.kill(os.getpid(), signal.SIGTERM)
