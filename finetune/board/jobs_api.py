"""OpenAI's fine-tuning endpoints: files, jobs, their events and checkpoints."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from finetune import catalog
from finetune.board import form, new_run, uploads
from finetune.board.form import text_of
from finetune.board.jobs import AUTO, HYPERPARAMETERS, METHODS, Job, Jobs
from finetune.errors import FinetuneError, did_you_mean
from finetune.methods import find_method
from finetune.runs.run import read_object, write_json

Parameters = dict[str, str | int | float | bool | None]


class OfMethod(BaseModel):
    """Hyperparameters of a method."""

    model_config = ConfigDict(extra="forbid")
    hyperparameters: Parameters = Field(default_factory=dict)


class Method(BaseModel):
    """The method of a job."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["supervised", "dpo"]
    supervised: OfMethod | None = None
    dpo: OfMethod | None = None


class Asked(BaseModel):
    """The body of a request for a job."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(min_length=1, max_length=4096)
    training_file: str
    validation_file: str | None = None
    suffix: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    seed: int | None = Field(None, ge=0, lt=2**31)
    hyperparameters: Parameters | None = None
    method: Method | None = None
    metadata: dict[str, str] | None = None


def router(jobs: Jobs) -> APIRouter:
    """The routes below /v1."""
    routes = APIRouter(prefix="/v1")
    folder = jobs.tasks.home / "files"

    # Files

    def stored(id: str) -> tuple[dict[str, Any], Path]:
        known = read_object(folder / f".{id}.json") if id.isascii() and "/" not in id else {}
        path = new_run.files(jobs.tasks).get(str(known.get("stored")))
        if not known or path is None:
            raise HTTPException(404, f"file: got '{id}', there is no such file")
        return known["file"], path

    @routes.post("/files")
    async def upload(request: Request) -> dict[str, Any]:
        id = f"file-{time.time_ns():x}"
        parts = await uploads.received(request, folder, id)
        path = parts.files.get("file")
        if path is None:
            raise HTTPException(400, "file: missing")
        file = {
            "id": id, "object": "file", "bytes": path.stat().st_size,
            "created_at": int(time.time()), "filename": parts.names["file"],
            "purpose": parts.fields.get("purpose", "fine-tune"), "status": "processed",
        }  # fmt: skip
        write_json(folder / f".{id}.json", {"file": file, "stored": path.name})
        return file

    @routes.get("/files")
    def list_files(after: str | None = None, limit: int = 100) -> dict[str, Any]:
        found = [read_object(path)["file"] for path in folder.glob(".file-*.json")]
        found.sort(key=lambda file: file["id"], reverse=True)
        return page(found, after, limit)

    @routes.get("/files/{id}")
    def one_file(id: str) -> dict[str, Any]:
        return stored(id)[0]

    @routes.get("/files/{id}/content")
    def content(id: str) -> Response:
        return FileResponse(stored(id)[1], media_type="application/octet-stream")

    @routes.delete("/files/{id}")
    def delete(id: str) -> dict[str, Any]:
        _, path = stored(id)
        busy = [
            job.id for job in jobs.all()
            if id in (job.asked["training_file"], job.asked.get("validation_file"))
            and jobs.status(job) not in ("succeeded", "failed", "cancelled")
        ]  # fmt: skip
        if busy:
            raise HTTPException(409, f"file: {busy[0]} needs it; cancel the job first")
        path.unlink(missing_ok=True)
        (folder / f".{id}.json").unlink(missing_ok=True)
        return {"id": id, "object": "file", "deleted": True}

    # Jobs

    def found(id: str) -> Job:
        job = jobs.find(id)
        if job is None:
            raise HTTPException(404, f"fine_tuning_job: got '{id}', there is no such job")
        return job

    @routes.post("/fine_tuning/jobs")
    async def create(asked: Asked) -> dict[str, Any]:
        return await run_in_threadpool(_create, asked)

    def _create(asked: Asked) -> dict[str, Any]:
        method = asked.method.type if asked.method else "supervised"
        of_method = getattr(asked.method, method, None) if asked.method else None
        parameters = of_method.hyperparameters if of_method else asked.hyperparameters or {}
        check(parameters, method)
        for name in ("training_file", "validation_file"):
            if id := getattr(asked, name):
                stored(id)
        job = jobs.add(
            {
                **asked.model_dump(exclude={"method", "hyperparameters"}),
                "method": method, "hyperparameters": parameters,
            }
        )  # fmt: skip
        return jobs.shown(job)

    @routes.get("/fine_tuning/jobs")
    def list_jobs(after: str | None = None, limit: int = 20) -> dict[str, Any]:
        return page([jobs.shown(job) for job in jobs.all()], after, limit)

    @routes.get("/fine_tuning/jobs/{id}")
    def one_job(id: str) -> dict[str, Any]:
        return jobs.shown(found(id))

    @routes.get("/fine_tuning/jobs/{id}/events")
    def events(id: str, after: str | None = None, limit: int = 20) -> dict[str, Any]:
        return page(jobs.events(found(id)), after, limit)

    @routes.get("/fine_tuning/jobs/{id}/checkpoints")
    def checkpoints(id: str, after: str | None = None, limit: int = 10) -> dict[str, Any]:
        return page(jobs.checkpoints(found(id)), after, limit)

    def change(id: str, verb: str, allowed: Sequence[str], do: Callable[[Job], None]) -> Any:
        job = found(id)
        status = jobs.status(job)
        if status not in allowed:
            raise HTTPException(409, f"{verb}: not possible, the job is {status}")
        do(job)
        return jobs.shown(job)

    waiting = ("validating_files", "queued", "running")

    @routes.post("/fine_tuning/jobs/{id}/cancel")
    def cancel(id: str) -> Any:
        return change(id, "cancel", (*waiting, "paused"), jobs.cancel)

    @routes.post("/fine_tuning/jobs/{id}/pause")
    def pause(id: str) -> Any:
        return change(id, "pause", waiting, jobs.pause)

    @routes.post("/fine_tuning/jobs/{id}/resume")
    def resume(id: str) -> Any:
        return change(id, "resume", ("paused",), jobs.resume)

    return routes


def check(parameters: Parameters, method: str) -> None:
    """Refuse hyperparameters that are neither the API's nor fields of a recipe.

    Raises:
        HTTPException: status 400, with the name.
    """
    usual = find_method(METHODS[method])()
    paths = {field.path for group in form.groups(usual) for field in group.fields}
    known = {*paths, *HYPERPARAMETERS, "learning_rate_multiplier"}
    for name, value in parameters.items():
        field = {**HYPERPARAMETERS, "learning_rate_multiplier": "optim.lr"}.get(name, name)
        if name not in known or field not in paths:
            hint = did_you_mean(name, known)
            raise HTTPException(400, f"hyperparameters.{name}: there is no such field{hint}")
        if value != AUTO:
            try:
                catalog.override(usual, [f"{field}={text_of(value)}"])
            except FinetuneError as error:
                said = str(error).removeprefix("override: ")
                raise HTTPException(400, f"hyperparameters.{name}: {said}") from None


def page(items: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """A part of a list, after the item of an id."""
    if not 1 <= limit <= 10_000:
        raise HTTPException(400, f"limit: got {limit}, expected 1 to 10000")
    place = next((at + 1 for at, item in enumerate(items) if item["id"] == after), 0)
    shown = items[place : place + limit]
    return {
        "object": "list", "data": shown, "has_more": place + limit < len(items),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }  # fmt: skip
