"""The HTTP application: OpenAI's routes and a chat page, with a bounded queue."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException

from finetune.errors import FinetuneError, did_you_mean
from finetune.serving.answer import Answer, BrokenModel, Question
from finetune.serving.bodies import Chat, Completion, Reply
from finetune.serving.guard import Guard
from finetune.serving.models import Served
from finetune.serving.problems import Json, about_field, problem
from finetune.serving.prompts import chat_text, question_of
from finetune.serving.requests import ChatRequest, TextRequest
from finetune.serving.scheduler import Job, Scheduler

PAGE = Path(__file__).parent / "page.html"
Pieces = asyncio.Queue[str | None]


class Answers:
    """The models by name, and the count of running and waiting requests."""

    def __init__(self, models: Mapping[str, Served], rows: int, queue: int) -> None:
        self.models, self.places = models, rows + queue
        self.first = next(iter(models))
        self.scheduler = Scheduler(rows)
        self.taken = 0

    def find(self, name: str | None) -> Served:
        if name is not None and name not in self.models:
            known = ", ".join(self.models)
            raise HTTPException(
                404, f"model: got '{name}', known: {known}{did_you_mean(name, self.models)}"
            )
        return self.models[name or self.first]

    def begin(self, served: Served, question: Question, pieces: Pieces, *, streams: bool) -> Job:
        """Submit a question; None is put into `pieces` at its end.

        If it `streams`, its text is put into `pieces` as it is generated.

        Raises:
            HTTPException: status 429 if the queue is full.
        """
        if self.taken >= self.places:
            text = f"{self.taken} requests are waiting; ask again later"
            raise HTTPException(429, text, {"Retry-After": "1"})
        loop = asyncio.get_running_loop()

        def write(text: str) -> None:
            if streams:
                loop.call_soon_threadsafe(pieces.put_nowait, text)

        def leave(answer: "Future[Answer]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._leave, pieces)

        job = self.scheduler.submit(served, question, write)
        self.taken += 1
        job.answer.add_done_callback(leave)
        return job

    def _leave(self, pieces: Pieces) -> None:
        self.taken -= 1
        pieces.put_nowait(None)


def build_app(
    models: Mapping[str, Served],
    *,
    rows: int = 8,
    queue: int = 16,
    key: str | None = None,
    local: bool = True,
) -> FastAPI:
    """The ASGI application.

    Args:
        models: Models by name; the first is the default.
        rows: Maximum number of requests that are answered at once.
        queue: Maximum number of waiting requests; further ones get status 429.
        key: Key that clients of /v1 must send as `Authorization: Bearer KEY`.
        local: Accept only local host names in requests, so that pages of other sites cannot use
            the server (DNS rebinding).
    """
    answers = Answers(models, rows, queue)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        answers.scheduler.close()

    app = FastAPI(title="finetune", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.answers = answers
    app.add_middleware(Guard, key=key, local=local)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        text = str(error.detail)
        if error.status_code in (404, 405) and text == HTTPStatus(error.status_code).phrase:
            text = f"{request.method} {request.url.path}: this route does not exist"
        elif error.status_code == 400 and error.__cause__ is not None:  # raised by FastAPI
            text = f"the body cannot be read as JSON: {error.__cause__}"
        return problem(error.status_code, text, error.headers)

    @app.exception_handler(FinetuneError)
    async def unusable(request: Request, error: FinetuneError) -> Response:
        return problem(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return problem(400, "\n".join(map(about_field, error.errors())))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return problem(500, _failure(error))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "requests": answers.taken}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE.read_text(encoding="utf-8")

    @app.get("/v1/models")
    async def known_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name) for name in models]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return _model(answers.find(name).name)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        served = answers.find(asked.model)
        prompt = chat_text(served, asked)
        question = await run_in_threadpool(question_of, served, asked, prompt)
        return await _reply(answers, request, served, question, Chat(served, asked))

    @app.post("/v1/completions")
    async def complete(asked: TextRequest, request: Request) -> Response:
        served = answers.find(asked.model)
        question = await run_in_threadpool(question_of, served, asked, asked.completion)
        return await _reply(answers, request, served, question, Completion(served, asked))

    return app


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "finetune"}


async def _reply(
    answers: Answers, request: Request, served: Served, question: Question, reply: Reply
) -> Response:
    pieces = Pieces()
    streams = reply.asked.stream and not reply.at_once
    job = answers.begin(served, question, pieces, streams=streams)
    if reply.asked.stream:
        return StreamingResponse(_events(job, pieces, reply), media_type="text/event-stream")
    answer = asyncio.wrap_future(job.answer)
    try:
        while not (await asyncio.wait([answer], timeout=0.5))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client has disconnected")
        return Json(reply.response(answer.result()))
    except (BrokenModel, RuntimeError, MemoryError) as error:  # the last two if out of memory
        return problem(500, _failure(error))
    finally:
        job.cancelled.set()


async def _events(job: Job, pieces: Pieces, reply: Reply) -> AsyncIterator[str]:
    """Server-sent events of an answer, which is cancelled if the client disconnects."""
    try:
        for event in reply.opening():
            yield _event(event)
        while (piece := await pieces.get()) is not None:
            yield _event(reply.piece(piece))
        try:
            for event in reply.closing(job.answer.result()):
                yield _event(event)
        except Exception as error:  # the status is already sent: report in an event
            yield _event(json.loads(bytes(problem(500, _failure(error)).body)))
        yield "data: [DONE]\n\n"
    finally:
        job.cancelled.set()


def _failure(error: Exception) -> str:
    return str(error) if isinstance(error, BrokenModel) else f"{type(error).__name__}: {error}"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
