"""The HTTP application: pages, what a browser asks while it shows them, and the jobs API."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, StreamingResponse

from finetune.board import chat_page, data_page, jobs_api, new_run, pages, run_page, uploads
from finetune.board.access import PAGE_OF_A_RUN, Access
from finetune.board.jobs import Jobs
from finetune.board.shelf import Shelf
from finetune.board.tasks import Tasks, Words
from finetune.errors import FinetuneError
from finetune.serving.problem import explained, problem

STATIC = Path(__file__).parent / "static"
STYLE = Path(__file__).parents[1] / "reports" / "templates" / "style.css"
MOST_STREAMS = 64
"""Event streams at once; each tab of a run has one."""
SECONDS = 2.0
"""Seconds between two looks at the files of a run, or at the tasks that wait."""
SHARE = 0.005
"""Part of a processor that live parts of a page take at most; they are made less often then."""


class Live:
    """What the open pages show, made once for all of them."""

    def __init__(self) -> None:
        self.streams = 0
        self.ended = False
        self._known: dict[str, tuple[float, dict[str, str]]] = {}
        self._making: dict[str, asyncio.Lock] = {}

    def end(self) -> None:
        self.ended = True

    async def parts(self, key: str, make: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Parts of a page by name, and kept for a while, which is longer if they cost more."""
        loop = asyncio.get_running_loop()

        def made() -> tuple[float, dict[str, str]]:
            began = time.thread_time()
            try:
                parts = make()
            except FinetuneError as error:  # deleted under the page
                parts = {"head": pages.rendered("problem", text=str(error))}
            return max(0.9 * SECONDS, (time.thread_time() - began) / SHARE), parts

        async with self._making.setdefault(key, asyncio.Lock()):
            until, parts = self._known.get(key, (0.0, {}))
            if loop.time() >= until:
                kept, parts = await run_in_threadpool(made)
                self._known[key] = loop.time() + kept, parts
            return parts

    async def events(self, key: str, make: Callable[[], dict[str, str]]) -> AsyncIterator[str]:
        """Server-sent events: each part when it has changed."""
        self.streams += 1
        sent: dict[str, str] = {}
        try:
            for turn in itertools.count():
                if self.ended:
                    return
                for name, text in (await self.parts(key, make)).items():
                    if sent.get(name) != text:
                        sent[name] = text
                        lines = "".join(f"data: {line}\n" for line in text.split("\n"))
                        yield f"event: {name}\n{lines}\n"
                if turn % 8 == 7:
                    yield ": still here\n\n"
                await asyncio.sleep(SECONDS)
        finally:
            self.streams -= 1
            if not self.streams:
                self._known.clear()


class Board(NamedTuple):
    """What the routes work on."""

    shelf: Shelf
    tasks: Tasks
    jobs: Jobs
    live: Live


PAGES: Mapping[str, tuple[str, Callable[[Board, Words], dict[str, Any]]]] = {
    "/": ("runs", lambda board, _: pages.listed(board.shelf, board.tasks)),
    "/list": ("list", lambda board, _: pages.listed(board.shelf, board.tasks)),
    "/run": ("run", lambda board, asked: run_page.page(board.shelf, board.tasks, asked)),
    "/compare": ("comparison", lambda board, asked: run_page.compared(board.shelf, asked)),
    "/new": ("new", lambda board, asked: new_run.page(board.shelf, board.tasks, asked)),
    "/data": ("data", lambda board, asked: data_page.page(board.shelf, board.tasks, asked)),
}
"""Template of each page, and what makes its values of the words of its address."""

ACTIONS: Mapping[str, Callable[[Shelf, Tasks, Words], str]] = {
    "/do": run_page.do, "/task": run_page.change,
    "/start": new_run.start, "/chain": new_run.start_chain,
}  # fmt: skip
"""What each form does; it returns the address of the page that shows it."""


async def form_of(request: Request) -> Words:
    """The fields of a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, f"content-type: got '{kind}', expected that of a form")
    try:
        text = (await request.body()).decode()
        return parse_qs(text, keep_blank_values=True, max_num_fields=2000)
    except ValueError as error:
        raise HTTPException(400, f"the form cannot be read: {error}") from None


def asked_of(request: Request) -> Words:
    """The words of an address."""
    return {name: request.query_params.getlist(name) for name in request.query_params}


def build_app(root: Path, token: str, local: bool = True) -> FastAPI:
    """The ASGI application of the runs in a folder.

    Args:
        token: what a writer, or a reader on another host, must have.
        local: whether only this machine can connect.
    """
    shelf, tasks = Shelf(root), Tasks(root)
    board = Board(shelf, tasks, Jobs(shelf, tasks), Live())

    async def again(turn: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(FinetuneError, OSError):  # a full disk: the next time
                await run_in_threadpool(turn)
            await asyncio.sleep(SECONDS)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        turns = [asyncio.create_task(again(each)) for each in (tasks.advance, board.jobs.prepare)]
        yield
        for turn in turns:
            turn.cancel()

    app = FastAPI(
        title="finetune board", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )
    app.state.live = board.live
    app.add_middleware(Access, token=token, local=local)
    for kind in (HTTPException, FinetuneError, RequestValidationError, OSError, Exception):
        app.add_exception_handler(kind, _refused)
    for routes in (_files(), _pages(board), _forms(board), _chats(board)):
        app.include_router(routes)
    app.include_router(jobs_api.router(board.jobs))
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """Whatever goes wrong is a card, or an error of the API; the server goes on."""
    status, text = explained(request, error)
    if request.url.path.startswith("/v1"):
        return problem(status, text)
    return pages.part("problem", request, status, text=text, title=HTTPStatus(status).phrase)


def _files() -> APIRouter:
    """The files of the pages."""
    routes = APIRouter()
    files = {path.name: path for path in (*STATIC.iterdir(), STYLE)}

    @routes.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return FileResponse(files[name], headers={"Cache-Control": "max-age=60"})

    return routes


def _pages(board: Board) -> APIRouter:
    """What is read."""
    shelf, tasks, live = board.shelf, board.tasks, board.live
    routes = APIRouter()

    def add(path: str, template: str, values: Callable[[Board, Words], dict[str, Any]]) -> None:
        @routes.get(path)
        def page(request: Request) -> Response:
            return HTMLResponse(pages.page(template, request, **values(board, asked_of(request))))

    for path, (template, values) in PAGES.items():
        add(path, template, values)

    @routes.get("/curves.json")
    def curves(run: str, since: int = 0) -> Response:
        return JSONResponse(run_page.curves(shelf, run, max(0, since)))

    @routes.get("/evaluation")
    def evaluation(run: str, name: str) -> Response:
        page = run_page.evaluation(shelf, run, name)
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_OF_A_RUN})

    @routes.get("/events")
    async def events(request: Request, run: str | None = None) -> Response:
        if live.streams >= MOST_STREAMS:
            raise HTTPException(429, f"{live.streams} pages are live; close one")
        trusted = pages.trusted(request)
        if run is None:
            made = live.events("", lambda: pages.changes(shelf, tasks))
        else:
            made = live.events(
                f"{trusted} {run}", lambda: run_page.live(shelf, tasks, run, trusted)
            )
        return StreamingResponse(made, media_type="text/event-stream")

    @routes.get("/rows")
    def rows(request: Request) -> Response:
        if not pages.trusted(request):
            raise HTTPException(401, "this starts a command: open the board with its token")
        return pages.part("rows", request, **data_page.rows(shelf, tasks, asked_of(request)))

    return routes


def _forms(board: Board) -> APIRouter:
    """What is sent."""
    shelf, tasks = board.shelf, board.tasks
    routes = APIRouter()

    def add(path: str, act: Callable[[Shelf, Tasks, Words], str]) -> None:
        @routes.post(path)
        async def action(request: Request) -> Response:
            sent = await form_of(request)
            return RedirectResponse(await run_in_threadpool(act, shelf, tasks, sent), 303)

    for path, act in ACTIONS.items():
        add(path, act)

    @routes.post("/row")
    async def row(request: Request) -> Response:
        found = await run_in_threadpool(data_page.edited, shelf, tasks, await form_of(request))
        return pages.part("tokens", request, title="A row as the model sees it", **found)

    @routes.post("/job")
    async def job(request: Request) -> Response:
        found = await run_in_threadpool(new_run.submission, shelf, tasks, await form_of(request))
        return pages.part("job", request, title="What would be submitted", **found)

    @routes.post("/plan")
    async def plan(request: Request) -> Response:
        sent = await form_of(request)
        found = await run_in_threadpool(new_run.planned, shelf, tasks, sent)
        if pages.of_htmx(request):
            headers = {"HX-Replace-Url": found["address"]}
            return HTMLResponse(pages.page("board_plan", request, **found), headers=headers)
        began = parse_qs(found["address"].partition("?")[2])
        values = await run_in_threadpool(new_run.page, shelf, tasks, began)
        return HTMLResponse(pages.page("new", request, **values | found))

    @routes.post("/files")
    async def upload(request: Request) -> Response:
        parts = await uploads.received(request, tasks.home / "files")
        if "file" not in parts.files:
            raise FinetuneError("file: choose a file with rows, such as a JSONL")
        path, model = parts.files["file"], parts.fields.get("model", "")
        name = await run_in_threadpool(new_run.make_recipe, tasks, path.stem, model, path)
        return RedirectResponse(f"/new?{urlencode({'from': name})}", 303)

    return routes


def _chats(board: Board) -> APIRouter:
    """What is passed on to servers of models."""
    shelf, tasks = board.shelf, board.tasks
    routes = APIRouter()

    @routes.get("/chat")
    def page(request: Request, run: str) -> Response:
        found = chat_page.page(shelf, tasks, run)
        if isinstance(found, Response):
            return found
        return HTMLResponse(pages.page("loading", request, **found))

    @routes.api_route("/talk/{id}/v1/{path:path}", methods=["GET", "POST"])
    async def talk(id: str, path: str, request: Request) -> Response:
        body = await request.body()
        served = await run_in_threadpool(chat_page.by_id, tasks, id)
        return await run_in_threadpool(
            chat_page.forward, served, request.method, f"/v1/{path}", body
        )

    @routes.get("/v1/models")
    def models() -> dict[str, Any]:
        return chat_page.models(tasks)

    async def answer(request: Request) -> Response:
        body = await request.body()
        served = await run_in_threadpool(chat_page.by_model, shelf, tasks, body)
        if isinstance(served, Response):
            return served
        return await run_in_threadpool(chat_page.forward, served, "POST", request.url.path, body)

    for path in ("/v1/chat/completions", "/v1/completions"):
        routes.post(path)(answer)
    return routes
