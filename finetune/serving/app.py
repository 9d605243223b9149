"""The HTTP application: OpenAI's routes and a chat page, with a bounded queue."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from finetune.errors import FinetuneError, did_you_mean
from finetune.serving.answer import Answer, Question
from finetune.serving.bodies import Chat, Completion, Reply
from finetune.serving.models import Served
from finetune.serving.prompts import chat_question, text_question
from finetune.serving.requests import ChatRequest, TextRequest
from finetune.serving.scheduler import Job, Scheduler

PAGE = Path(__file__).parent / "page.html"
LARGEST_BODY = 8 * 2**20
"""Maximum bytes of a request."""


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

    def begin(self, served: Served, question: Question, pieces: "asyncio.Queue[str]") -> Job:
        """Submit a question, whose text is put into `pieces` as it is generated.

        Raises:
            HTTPException: status 429 if the queue is full.
        """
        if self.taken >= self.places:
            raise HTTPException(429, f"{self.taken} requests are waiting; ask again later")
        loop = asyncio.get_running_loop()

        def write(text: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, text)

        def leave(answer: "Future[Answer]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._leave)

        job = self.scheduler.submit(served, question, write)
        self.taken += 1
        job.answer.add_done_callback(leave)
        return job

    def _leave(self) -> None:
        self.taken -= 1


class LimitBody:
    """Rejects a body larger than `LARGEST_BODY` before it is read completely."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > LARGEST_BODY:
                text = f"the request has more than {LARGEST_BODY:,} bytes"
                return await problem(413, text)(scope, receive, send)
            if not message.get("more_body"):
                break
        given = False

        async def again() -> Any:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return await self.app(scope, again, send)


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
    app.add_middleware(LimitBody)
    if local:
        app.add_middleware(
            TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]", "::1"]
        )

    @app.middleware("http")
    async def check_key(request: Request, go_on: Any) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        right = key is None or secrets.compare_digest(given.encode(), key.encode())
        if request.url.path.startswith("/v1") and not right:
            return problem(401, "send the server's key as 'Authorization: Bearer KEY'")
        kind = request.headers.get("content-type", "")
        if request.method == "POST" and not kind.startswith("application/json"):
            return problem(415, f"content-type: got '{kind}', expected application/json")
        return await go_on(request)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail))

    @app.exception_handler(FinetuneError)
    async def unusable(request: Request, error: FinetuneError) -> Response:
        return problem(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return problem(400, "\n".join(_told(each) for each in error.errors()))

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
        question = chat_question(served, asked)
        return await _reply(answers, request, served, question, Chat(served, asked))

    @app.post("/v1/completions")
    async def complete(asked: TextRequest, request: Request) -> Response:
        served = answers.find(asked.model)
        question = text_question(served, asked)
        return await _reply(answers, request, served, question, Completion(served, asked))

    return app


def problem(status: int, text: str) -> JSONResponse:
    """An error response in the format of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": text, "type": kind, "param": None, "code": None}
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse({"error": error}, status, headers)


def _told(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"][1:])
    if error["type"] == "extra_forbidden":
        return f"{place}: this server has no such field, and leaving it out may change the answer"
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error['ctx']['error']} at character {place}"
    return f"{place}: {error['msg']}"


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "finetune"}


async def _reply(
    answers: Answers, request: Request, served: Served, question: Question, reply: Reply
) -> Response:
    pieces: asyncio.Queue[str] = asyncio.Queue()
    job = answers.begin(served, question, pieces)
    if reply.asked.stream:
        return StreamingResponse(_events(job, pieces, reply), media_type="text/event-stream")
    answer = asyncio.wrap_future(job.answer)
    try:
        while not (await asyncio.wait([answer], timeout=0.5))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client has hung up")
        return JSONResponse(reply.whole(answer.result()))
    except (RuntimeError, MemoryError) as error:  # torch raises them when out of memory
        return problem(500, f"{type(error).__name__}: {error}")
    finally:
        job.cancelled.set()


async def _events(job: Job, pieces: "asyncio.Queue[str]", reply: Reply) -> AsyncIterator[str]:
    """Server-sent events of an answer, which is cancelled if the client disconnects."""
    answer = asyncio.wrap_future(job.answer)
    try:
        for event in reply.opening():
            yield _event(event)
        while not answer.done() or not pieces.empty():
            piece = asyncio.ensure_future(pieces.get())
            await asyncio.wait([piece, answer], return_when=asyncio.FIRST_COMPLETED)
            if not piece.done():
                piece.cancel()
            elif not reply.at_once:
                yield _event(reply.piece(piece.result()))
        try:
            for event in reply.closing(answer.result()):
                yield _event(event)
        except Exception as error:  # the status is already sent: report in an event
            yield _event(json.loads(bytes(problem(500, f"{type(error).__name__}: {error}").body)))
        yield "data: [DONE]\n\n"
    finally:
        job.cancelled.set()


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
