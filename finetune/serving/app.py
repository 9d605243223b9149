"""The HTTP application: OpenAI's routes and a chat page, with a bounded queue."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException

from finetune.data.chat.tokens import Row as PromptRow
from finetune.errors import FinetuneError, did_you_mean
from finetune.serving.bodies import Body, Chat, Completion
from finetune.serving.guard import Guard, policy
from finetune.serving.models import Served
from finetune.serving.problem import Json, explained, problem
from finetune.serving.reply import Reply
from finetune.serving.requests import ChatRequest, Fetch, TextRequest, prompt_of
from finetune.serving.scheduler import Scheduler

PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
ENDING = "the server is shutting down"
Pieces = asyncio.Queue[str | None]


class Answers:
    """The models by name, and the count of running and waiting requests."""

    def __init__(
        self, models: Mapping[str, Served], rows: int, queue: int, fetch: Fetch | None
    ) -> None:
        self.fetch, self.models, self.places = fetch, models, rows + queue
        self.first = next(iter(models))
        self.scheduler = Scheduler(rows)
        self.taken = 0
        self.reading = asyncio.Lock()
        """Held while a prompt is rendered and tokenized, which needs memory."""
        self._replies = set[Reply]()
        self._ended = False

    def find(self, name: str | None) -> Served:
        if name is not None and name not in self.models:
            known = ", ".join(self.models)
            raise HTTPException(
                404, f"model: got '{name}', known: {known}{did_you_mean(name, self.models)}"
            )
        return self.models[name or self.first]

    def take(self) -> None:
        """Take a place in the queue, until `leave`.

        Raises:
            HTTPException: status 429 if the queue is full.
        """
        if self.taken >= self.places:
            text = f"{self.taken} requests are waiting; ask again later"
            raise HTTPException(429, text, {"Retry-After": "1"})
        self.taken += 1

    def leave(self, prompt: "asyncio.Future[PromptRow]") -> None:
        """Leave the place of a request that got no answer."""
        self.taken -= 1
        _ = prompt.cancelled() or prompt.exception()  # reported already, or its client left

    def begin(self, body: Body, prompt: PromptRow, pieces: Pieces, *, streams: bool) -> Reply:
        """Submit a prompt, which leaves its place when it is answered.

        If it `streams`, its text is put into `pieces` as it is generated, and None at its end.

        Raises:
            HTTPException: status 503 if the server ends.
            FinetuneError: the prompt is invalid, or has no room in the context.
        """
        if self._ended:
            raise HTTPException(503, ENDING)
        loop = asyncio.get_running_loop()

        def soon(function: Callable[..., None], *arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(function, *arguments)

        def write(text: str) -> None:
            if streams:
                soon(pieces.put_nowait, text)

        reply = Reply(body.served, prompt, body.asked, write)
        self.scheduler.submit(reply)
        self._replies.add(reply)
        reply.answer.add_done_callback(lambda _: soon(self._leave, reply, pieces))
        return reply

    def _leave(self, reply: Reply, pieces: Pieces) -> None:
        self.taken -= 1
        self._replies.remove(reply)
        pieces.put_nowait(None)

    def end(self) -> None:
        """End all answers with an error."""
        self._ended = True
        for reply in self._replies:
            reply.fail(HTTPException(503, ENDING))


def build_app(
    models: Mapping[str, Served],
    *,
    rows: int = 8,
    queue: int = 16,
    key: str | None = None,
    local: bool = True,
    fetch: Fetch | None = None,
) -> FastAPI:
    """The ASGI application.

    Args:
        models: Models by name; the first is the default.
        rows: Maximum number of requests that are answered at once.
        queue: Maximum number of waiting requests; further ones get status 429.
        key: Key that clients of /v1 must send as `Authorization: Bearer KEY`.
        local: Accept only local host names in requests, so that pages of other sites cannot use
            the server (DNS rebinding).
        fetch: Reads an image at a web address; None refuses web addresses.
    """
    answers = Answers(models, rows, queue, fetch)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        answers.scheduler.close()

    app = FastAPI(title="finetune", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.answers = answers
    app.add_middleware(Guard, key=key, local=local)

    for kind in (StarletteHTTPException, FinetuneError, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refused)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "requests": answers.taken}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": policy(PAGE)})

    @app.get("/v1/models")
    async def known_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name) for name in models]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return _model(answers.find(name).name)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await _answer(answers, request, Chat(answers.find(asked.model), asked))

    @app.post("/v1/completions")
    async def complete(asked: TextRequest, request: Request) -> Response:
        return await _answer(answers, request, Completion(answers.find(asked.model), asked))

    return app


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "finetune"}


async def _answer(answers: Answers, request: Request, body: Body) -> Response:
    pieces = Pieces()
    answers.take()
    prompt = asyncio.ensure_future(_prompt(answers, request, body))
    try:
        await _wait(request, prompt)
        streams = body.asked.stream and not body.at_once
        reply = answers.begin(body, prompt.result(), pieces, streams=streams)
    except BaseException:
        prompt.add_done_callback(answers.leave)  # what a thread has begun is completed
        raise
    if body.asked.stream:
        events = _events(request, reply, pieces, body)
        return StreamingResponse(events, media_type="text/event-stream")
    answer = asyncio.wrap_future(reply.answer)
    try:
        await _wait(request, answer)
        return Json(body.response(answer.result()))
    except (RuntimeError, MemoryError) as error:  # out of memory
        return await _refused(request, error)
    finally:
        reply.cancelled.set()


async def _prompt(answers: Answers, request: Request, body: Body) -> PromptRow:
    async with answers.reading:
        await _stays(request)
        return await run_in_threadpool(prompt_of, body.served, body.asked, answers.fetch)


async def _wait(request: Request, future: "asyncio.Future[Any]") -> None:
    """Wait for a result, while the client does."""
    while not (await asyncio.wait([future], timeout=0.5))[0]:
        await _stays(request)


async def _stays(request: Request) -> None:
    if await request.is_disconnected():
        raise HTTPException(499, "the client has disconnected")


async def _events(request: Request, reply: Reply, pieces: Pieces, body: Body) -> AsyncIterator[str]:
    """Server-sent events of an answer, which is cancelled if the client disconnects."""
    try:
        for event in body.opening():
            yield _event(event)
        while (piece := await pieces.get()) is not None:
            yield _event(body.piece(piece))
        try:
            for event in body.closing(reply.answer.result()):
                yield _event(event)
        except Exception as error:  # the status is already sent: report in an event
            yield _event(json.loads(bytes((await _refused(request, error)).body)))
        yield "data: [DONE]\n\n"
    finally:
        reply.cancelled.set()


async def _refused(request: Request, error: Exception) -> Response:
    return problem(*explained(request, error), getattr(error, "headers", None))


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
