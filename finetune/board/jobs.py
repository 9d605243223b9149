"""Jobs of OpenAI's fine-tuning API as files: what was asked, and what became of it.

    RUNS/.board/jobs/ID/
      job.json     what the client asked
      recipe.json  the recipe that was made from it: {"name": ...}
      error.json   why there is none
      cancelled, paused    marks

Everything else is read from the task that trains it and from its run.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune import catalog
from finetune.board import new_run, planning
from finetune.board.form import text_of
from finetune.board.shelf import Shelf
from finetune.board.tasks import Task, Tasks
from finetune.errors import FinetuneError
from finetune.runs.progress import Watch
from finetune.runs.run import read_object, write_json, write_whole

HYPERPARAMETERS = {"n_epochs": "epochs", "batch_size": "batch.rows", "beta": "beta"}
"""Fields of a recipe by their names in the API, which also has `learning_rate_multiplier`."""
METHODS = {"supervised": "sft", "dpo": "dpo"}
"""Methods by their names in the API."""
AUTO = "auto"
ECHOED = ("model", "training_file", "validation_file", "metadata")
MOST_STEPS = 50
"""Steps in the events of a job, evenly spaced."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job with its folder."""

    folder: Path
    asked: Mapping[str, Any]

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def run(self) -> str:
        """Name of its run, and of the model that comes out."""
        return str(self.asked["run"])

    @property
    def error(self) -> dict[str, Any]:
        return read_object(self.folder / "error.json")

    def marked(self, name: str) -> bool:
        return (self.folder / name).exists()

    def mark(self, name: str) -> None:
        write_whole(self.folder / name, "")


class Jobs:
    """The jobs of a folder of runs."""

    def __init__(self, shelf: Shelf, tasks: Tasks) -> None:
        self.shelf, self.tasks = shelf, tasks
        self.home = tasks.home / "jobs"

    def all(self) -> list[Job]:
        """Every job, the newest first."""
        found = list[Job]()
        for path in self.home.glob("ftjob-*/job.json"):
            with contextlib.suppress(FinetuneError):
                found.append(Job(path.parent, read_object(path)))
        return sorted(found, key=lambda job: -float(job.asked.get("created", 0)))

    def find(self, id: str) -> Job | None:
        return next((job for job in self.all() if job.id == id), None)

    def task(self, job: Job) -> Task | None:
        """The newest launch of a job."""
        return next((task for task in self.tasks.all() if task.job == job.id), None)

    def add(self, asked: Mapping[str, Any]) -> Job:
        """Record a job; `prepare` makes its recipe."""
        id = f"ftjob-{secrets.token_hex(12)}"
        name = f"{asked.get('suffix') or 'job'}-{id[-8:]}"
        folder = self.home / id
        value = {**asked, "created": time.time(), "run": name}
        write_json(folder / "job.json", value)
        return Job(folder, value)

    def status(self, job: Job) -> str:
        """Its status by the API's words."""
        task = self.task(job)
        state = "" if task is None else task.state
        if state in ("finished", "running"):
            return "succeeded" if state == "finished" else state
        if job.marked("cancelled"):
            return "cancelled"
        if job.error or state == "failed":
            return "failed"
        if job.marked("paused") or state == "paused":
            return "paused"
        return {"": "validating_files", "queued": "queued"}.get(state, "cancelled")

    # Changes --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the recipe of the oldest job that has none, and queue its launch."""
        begun = {task.job for task in self.tasks.all()}
        new = [job for job in reversed(self.all()) if job.id not in begun]
        waiting = [job for job in new if self.status(job) == "validating_files"]
        if not waiting:
            return
        with (self.home / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another board is at it
                return
            job = waiting[0]
            try:
                self._launch(job)
            except FinetuneError as error:
                write_json(job.folder / "error.json", {"message": str(error), "time": time.time()})

    def _launch(self, job: Job) -> None:
        known = read_object(job.folder / "recipe.json")
        asked = job.asked
        files = new_run.files(self.tasks)
        if not known:
            data = _file(files, asked["training_file"])
            method = METHODS[asked["method"]]
            more = [] if method == "sft" else ["--method", method]
            name = new_run.make_recipe(self.tasks, job.run, asked["model"], data, *more)
            known = {"name": name}
            write_json(job.folder / "recipe.json", known)
        if job.marked("cancelled"):
            return
        began = new_run.origin(self.shelf, self.tasks, known["name"])
        words = self._words(job, began.recipe, files)
        recipe = catalog.override(began.recipe, words) if words else began.recipe
        new_run.launch(
            self.shelf, self.tasks, job.run, began.word, words, recipe, planning.Machine(),
            job=job.id,
        )  # fmt: skip

    def _words(self, job: Job, recipe: Any, files: Mapping[str, Path]) -> list[str]:
        asked = job.asked
        words = [] if asked.get("seed") is None else [f"seed={asked['seed']}"]
        for name, value in asked["hyperparameters"].items():
            if value == AUTO:
                continue
            if name == "learning_rate_multiplier":
                words.append(f"optim.lr={recipe.optim.lr * value!r}")
                continue
            if name == "batch_size" and isinstance(value, int):  # a step has whole micro-batches
                words.append(f"batch.micro_rows={math.gcd(recipe.batch.micro_rows, value)}")
            words.append(f"{HYPERPARAMETERS.get(name, name)}={text_of(value)}")
        if asked.get("validation_file"):
            first = catalog.to_fields(recipe)["data"][0]
            place = str(_file(files, asked["validation_file"]).resolve())
            words += [f"eval_data={json.dumps([{**first, 'source': place}])}", "eval_rows=null"]
        return words

    def cancel(self, job: Job) -> None:
        job.mark("cancelled")
        if task := self.task(job):
            self.tasks.stop(task)

    def pause(self, job: Job) -> None:
        """Save and stop a job that runs, or keep one that waits from starting."""
        job.mark("paused")
        task = self.task(job)
        if task is not None and task.state == "queued":
            self.tasks.hold(task, paused=True)
        elif task is not None:
            self.tasks.stop(task)

    def resume(self, job: Job) -> None:
        """Continue a paused job from its checkpoint."""
        task = self.task(job)
        (job.folder / "paused").unlink(missing_ok=True)
        if task is not None and task.state == "paused":
            self.tasks.hold(task, paused=False)
        elif task is not None and task.state not in ("running", "queued"):
            words = [word for word in task.words if word not in ("--resume", "auto")]
            words = [*words, "--resume", "auto"]
            self.tasks.add("launch", words, job.run, task.log, task.need, job=job.id)

    # What the API shows

    def shown(self, job: Job) -> dict[str, Any]:
        """A job as the API writes it."""
        asked, status, task = job.asked, self.status(job), self.task(job)
        watch = self._watch(job)
        ended = {} if task is None else task.ended
        finished = ended.get("time") or job.error.get("time")
        left = math.nan if watch is None else watch.seconds_left
        method = asked["method"]
        over = status in ("succeeded", "failed", "cancelled")
        usual = ("n_epochs", "batch_size", "learning_rate_multiplier")
        parameters = dict(asked["hyperparameters"])
        return {
            "id": job.id, "object": "fine_tuning.job", "organization_id": "local",
            "created_at": int(asked["created"]), "status": status, "seed": asked.get("seed") or 0,
            "error": self._error(job, task) if status == "failed" else None,
            "fine_tuned_model": job.run if status == "succeeded" else None,
            "finished_at": int(finished) if over and finished else None,
            "estimated_finish": int(time.time() + left) if math.isfinite(left) else None,
            "trained_tokens": self._tokens(job) if status == "succeeded" else None,
            "hyperparameters": {name: parameters.get(name, AUTO) for name in usual},
            "method": {"type": method, method: {"hyperparameters": parameters}},
            "result_files": [], "integrations": [],
            **{name: asked.get(name) for name in ECHOED},
        }  # fmt: skip

    def _watch(self, job: Job) -> Watch | None:
        with contextlib.suppress(FinetuneError):
            return self.shelf.watch(job.run)
        return None

    def _tokens(self, job: Job) -> int | None:
        with contextlib.suppress(FinetuneError):
            return int(self.shelf.whole_curves(job.run).tokens[-1])
        return None

    def _error(self, job: Job, task: Task | None) -> dict[str, Any]:
        said = [line for line in (task.last_words() if task else ()) if line.strip()]
        wrong = [line for line in said if line.startswith("error:")] or said[-3:]
        text = job.error.get("message") or "\n".join(wrong) or "its process was killed"
        made = (job.folder / "recipe.json").exists()
        code = "training_failed" if not job.error else "invalid_plan" if made else "invalid_file"
        return {"code": code, "message": text, "param": None if made else "training_file"}

    def events(self, job: Job) -> list[dict[str, Any]]:
        """What happened to a job, the newest first."""
        found = list(self._events(job))
        found.sort(key=lambda each: (each["created_at"], each["order"]), reverse=True)
        for each in found:
            del each["order"]
        return found

    def _events(self, job: Job) -> Iterator[dict[str, Any]]:
        def event(name: str, when: float, text: str, order: int = 0, **data: Any) -> dict[str, Any]:
            return {
                "id": f"ftevent-{job.id[6:]}-{name}", "object": "fine_tuning.job.event",
                "created_at": int(when), "level": "error" if name == "failed" else "info",
                "message": text, "type": "metrics" if data else "message", "data": data or None,
                "order": order,
            }  # fmt: skip

        yield event("created", job.asked["created"], f"Created fine-tuning job: {job.id}")
        task, watch, status = self.task(job), self._watch(job), self.status(job)
        if task is not None:
            yield event(
                "validated", task.created, f"Files validated; job started: {task.command}", 1
            )
        if watch is not None and watch.start:
            read = self.shelf.whole_curves(job.run).values()
            losses = read["curves"].get("loss", {}).get("mean", [])
            every = max(1, len(losses) // MOST_STEPS)
            began = watch.start.get("time") or 0.0
            for place in range(every - 1, len(losses), every):
                step, when = read["step"][place], began + 3600 * read["hours"][place]
                data = {"step": step, "total_steps": watch.steps, "train_loss": losses[place]}
                text = f"Step {step}/{watch.steps}: training loss={losses[place] or math.nan:.4f}"
                yield event(f"step-{step}", when, text, step + 2, **data)
            for each in watch.evaluations:
                data = {"step": each["step"], "valid_loss": each["loss"]}
                text = f"Step {each['step']}: valid loss={each['loss'] or math.nan:.4f}"
                yield event(f"eval-{each['step']}", each["time"], text, each["step"] + 2, **data)
        if status in ("succeeded", "failed", "cancelled"):
            words = {"succeeded": "The job has successfully completed", "cancelled": "Cancelled"}
            wrong = self._error(job, task)["message"] if status == "failed" else ""
            ended = (task.ended if task else {}).get("time") or job.error.get("time") or time.time()
            yield event(status, ended, words.get(status, wrong), 2**40)

    def checkpoints(self, job: Job) -> list[dict[str, Any]]:
        """The complete checkpoints of a job, the newest first."""
        watch = self._watch(job)
        if watch is None:
            return []
        losses = {each.get("step"): each.get("loss") for each in watch.evaluations}
        saved = {each.get("step"): each.get("time", 0) for each in watch.saved}
        return [
            {
                "id": f"ftckpt-{job.id[6:]}-{step}", "object": "fine_tuning.job.checkpoint",
                "created_at": int(saved.get(step, 0)), "fine_tuning_job_id": job.id,
                "fine_tuned_model_checkpoint": f"{job.run}:step-{step}", "step_number": step,
                "metrics": {"step": step, "valid_loss": losses.get(step)},
            }
            for step in reversed(watch.run.steps())
        ]  # fmt: skip


def _file(files: Mapping[str, Path], id: str) -> Path:
    found = next((path for name, path in files.items() if path.stem == id or name == id), None)
    if found is None:
        raise FinetuneError(f"{id}: no such file; it may have been deleted")
    return found
