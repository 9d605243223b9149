"""The HTTP application: pages, what a browser asks while it shows them, and the jobs API."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, StreamingResponse

from finetune.board import chat, data_page, jobs_api, new_run, pages, run_page, uploads
from finetune.board.access import PAGE_OF_A_RUN, Access
from finetune.board.jobs import Jobs
from finetune.board.shelf import Shelf
from finetune.board.tasks import Tasks
from finetune.errors import FinetuneError, first_line
from finetune.serving.problem import about_field, problem

STATIC = Path(__file__).parent / "static"
STYLES = (
    Path(__file__).parents[1] / "reports" / "templates" / "style.css",
    STATIC / "uPlot.min.css",
    STATIC / "board.css",
)
KINDS = {".js": "text/javascript", ".txt": "text/plain"}
MOST_STREAMS = 64
"""Event streams at once; each tab of a run has one."""
SECONDS = 2.0
"""Seconds between two looks at the files of a run."""
SECONDS_OF_QUEUE = 2.0
"""Seconds between two looks at the tasks that wait."""


class Live:
    """What the open pages show, made once for all of them."""

    def __init__(self) -> None:
        self.streams = 0
        self.ended = False
        self._known: dict[str, tuple[float, dict[str, str]]] = {}
        self._making: dict[str, asyncio.Lock] = {}

    async def parts(self, key: str, make: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Parts of a page by name, at most `SECONDS` old."""
        loop = asyncio.get_running_loop()
        async with self._making.setdefault(key, asyncio.Lock()):
            made, parts = self._known.get(key, (-SECONDS, {}))
            if loop.time() - made >= SECONDS * 0.9:
                parts = await run_in_threadpool(make)
                self._known[key] = loop.time(), parts
            return parts

    async def events(self, key: str, make: Callable[[], dict[str, str]]) -> AsyncIterator[str]:
        """Server-sent events: each part when it has changed."""
        self.streams += 1
        sent: dict[str, str] = {}
        quiet = 0.0
        try:
            while not self.ended:
                try:
                    parts = await self.parts(key, make)
                except FinetuneError as error:  # deleted under the page
                    parts = {"head": pages.card(str(error))}
                for name, text in parts.items():
                    if sent.get(name) != text:
                        sent[name], quiet = text, 0.0
                        lines = "".join(f"data: {line}\n" for line in text.split("\n"))
                        yield f"event: {name}\n{lines}\n"
                if quiet > 15:
                    quiet = 0.0
                    yield ": still here\n\n"
                quiet += SECONDS
                await asyncio.sleep(SECONDS)
        finally:
            self.streams -= 1
            if not self.streams:
                self._known.clear()


async def form_of(request: Request) -> dict[str, list[str]]:
    """The fields of a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, f"content-type: got '{kind}', expected that of a form")
    try:
        pairs = parse_qsl(
            (await request.body()).decode(), keep_blank_values=True, max_num_fields=2000
        )
    except ValueError as error:
        raise HTTPException(400, f"the form cannot be read: {error}") from None
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def asked_of(request: Request) -> dict[str, list[str]]:
    """The words of an address."""
    return {name: request.query_params.getlist(name) for name in request.query_params}


def of_htmx(request: Request) -> bool:
    """Whether a part of a page is asked for, not a page."""
    return request.headers.get("hx-request") == "true"


def build_app(root: Path, token: str, local: bool = True) -> FastAPI:
    """The ASGI application of the runs in a folder.

    Args:
        token: what a writer, or a reader on another host, must have.
        local: whether only this machine can connect.
    """
    shelf, tasks, live = Shelf(root), Tasks(root), Live()
    jobs = Jobs(shelf, tasks)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def keep_advancing() -> None:
            while True:
                with contextlib.suppress(FinetuneError, OSError):  # a full disk: the next time
                    await run_in_threadpool(tasks.advance)
                await asyncio.sleep(SECONDS_OF_QUEUE)

        async def keep_preparing() -> None:
            while True:
                with contextlib.suppress(FinetuneError, OSError):
                    await run_in_threadpool(jobs.prepare)
                await asyncio.sleep(SECONDS_OF_QUEUE)

        turns = [asyncio.create_task(each()) for each in (keep_advancing, keep_preparing)]
        yield
        live.ended = True
        for turn in turns:
            turn.cancel()

    app = FastAPI(title="finetune board", docs_url=None, redoc_url=None, openapi_url=None,
                  lifespan=lifespan)  # fmt: skip
    app.state.live, app.state.shelf, app.state.tasks = live, shelf, tasks
    app.add_middleware(Access, token=token, local=local)
    styles = "\n".join(path.read_text(encoding="utf-8") for path in STYLES)

    def refused(request: Request, status: int, text: str) -> Response:
        if request.url.path.startswith("/v1"):
            return problem(status, text)
        name = "problem" if of_htmx(request) else "card"
        return HTMLResponse(pages.page(name, request, text=text, title="No"), status)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        text = str(error.detail)
        if text == HTTPStatus(error.status_code).phrase:
            text = f"{request.method} {request.url.path}: there is no such page"
        return refused(request, error.status_code, text)

    @app.exception_handler(FinetuneError)
    async def of_user(request: Request, error: FinetuneError) -> Response:
        return refused(request, 400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return refused(request, 400, "\n".join(map(about_field, error.errors())))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return refused(request, 500, f"{type(error).__name__}: {first_line(error)}")

    @app.get("/static/board.css")
    async def style() -> Response:
        return Response(styles, media_type="text/css", headers={"Cache-Control": "max-age=60"})

    @app.get("/static/{name}")
    async def static(name: str) -> Response:
        path = STATIC / name
        if path.suffix not in KINDS or path.parent != STATIC or not path.is_file():
            raise HTTPException(404)
        kept = {"Cache-Control": "max-age=3600" if "min" in name else "max-age=60"}
        return Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=kept)

    @app.get("/", response_class=HTMLResponse)
    def runs(request: Request) -> str:
        return pages.page("runs", request, **pages.listed(shelf, tasks))

    @app.get("/list", response_class=HTMLResponse)
    def part_of_runs(request: Request) -> str:
        return pages.page("list", request, **pages.listed(shelf, tasks))

    @app.get("/run", response_class=HTMLResponse)
    def one_run(request: Request, run: str, x: str = "step") -> str:
        found = run_page.page(shelf, tasks, run, x)
        return pages.page("run", request, **found)

    @app.get("/curves.json")
    def curves(run: str, since: int = 0) -> Response:
        return JSONResponse(run_page.curves(shelf, run, max(0, since)))

    @app.get("/log", response_class=PlainTextResponse)
    def log(run: str) -> str:
        return "\n".join(run_page.log_of(shelf, tasks, run))

    @app.get("/evaluation")
    def evaluation(run: str, name: str) -> Response:
        page = run_page.evaluation(shelf, run, name)
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_OF_A_RUN})

    @app.get("/events")
    async def events(request: Request, run: str | None = None) -> Response:
        if live.streams >= MOST_STREAMS:
            raise HTTPException(429, f"{live.streams} pages are live; close one")
        if run is None:
            made = live.events("", lambda: pages.changes(shelf, tasks))
        else:
            trusted = pages.trusted(request)
            key = f"{trusted} {run}"
            made = live.events(key, lambda: run_page.live(shelf, tasks, run, trusted))
        return StreamingResponse(made, media_type="text/event-stream")

    @app.get("/compare", response_class=HTMLResponse)
    def comparison(request: Request, x: str = "step") -> str:
        names = request.query_params.getlist("run")
        return pages.page("compare", request, **run_page.compared(shelf, names, x))

    @app.get("/new", response_class=HTMLResponse)
    def new(request: Request) -> str:
        return pages.page("new", request, **new_run.page(shelf, tasks, asked_of(request)))

    @app.get("/data", response_class=HTMLResponse)
    def data(request: Request) -> str:
        return pages.page("data", request, **data_page.page(shelf, tasks, asked_of(request)))

    @app.get("/rows", response_class=HTMLResponse)
    def rows(request: Request) -> str:
        if not pages.trusted(request):
            raise HTTPException(401, "this starts a command: open the board with its token")
        asked = asked_of(request)
        values = data_page.page(shelf, tasks, asked) | data_page.rows(shelf, tasks, asked)
        return pages.page("rows" if of_htmx(request) else "data", request, **values)

    @app.post("/row")
    async def row(request: Request) -> Response:
        found = await run_in_threadpool(data_page.edited, shelf, tasks, await form_of(request))
        return HTMLResponse(
            pages.page("tokens" if of_htmx(request) else "row", request, title="A row", **found)
        )

    @app.post("/plan")
    async def plan(request: Request) -> Response:
        sent = await form_of(request)
        found = await run_in_threadpool(new_run.planned, shelf, tasks, sent)
        if of_htmx(request):
            headers = {"HX-Replace-Url": found["address"]}
            return HTMLResponse(pages.page("board_plan", request, **found), headers=headers)
        began = {name: [value] for name, value in parse_qsl(found["address"].partition("?")[2])}
        began["set"] = new_run.filled(shelf, tasks, sent).words
        values = await run_in_threadpool(new_run.page, shelf, tasks, began)
        return HTMLResponse(pages.page("new", request, **values | found))

    @app.post("/start")
    async def start(request: Request) -> Response:
        task = await run_in_threadpool(new_run.start, shelf, tasks, await form_of(request))
        return RedirectResponse(f"/run?{urlencode({'run': task.run})}", 303)

    @app.post("/chain")
    async def chain(request: Request) -> Response:
        task = await run_in_threadpool(new_run.start_chain, shelf, tasks, await form_of(request))
        return RedirectResponse(f"/run?{urlencode({'run': task.run})}", 303)

    @app.post("/files")
    async def upload(request: Request) -> Response:
        parts = await uploads.received(request, tasks.home / "files")
        if "file" not in parts.files:
            raise FinetuneError("file: choose a file with rows, such as a JSONL")
        stored = parts.files["file"]
        if parts.fields.get("model"):
            name = await run_in_threadpool(
                new_run.make_recipe, tasks, stored.stem, parts.fields["model"], stored
            )
            return RedirectResponse(f"/new?{urlencode({'from': name})}", 303)
        return RedirectResponse(f"/data?{urlencode({'source': stored.name})}", 303)

    @app.get("/chat", response_class=HTMLResponse)
    def talk(request: Request, run: str) -> Any:
        found = chat.page(shelf, tasks, run)
        return pages.page("loading", request, **found) if isinstance(found, dict) else found

    @app.api_route("/talk/{id}/v1/{path:path}", methods=["GET", "POST"])
    async def talking(id: str, path: str, request: Request) -> Response:
        body = await request.body()
        served = await run_in_threadpool(chat.by_id, tasks, id)
        return await run_in_threadpool(chat.forward, served, request.method, f"/v1/{path}", body)

    app.include_router(jobs_api.router(jobs))

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return chat.models(tasks)

    @app.post("/v1/{path:path}")
    async def answer(path: str, request: Request) -> Response:
        if path not in ("chat/completions", "completions"):
            raise HTTPException(404)
        body = await request.body()
        served = await run_in_threadpool(chat.by_model, shelf, tasks, body)
        if isinstance(served, Response):
            return served
        return await run_in_threadpool(chat.forward, served, "POST", f"/v1/{path}", body)

    @app.post("/do")
    async def do(request: Request) -> Response:
        form = await form_of(request)
        run, verb = form.get("run", [""])[0], form.get("verb", [""])[0]
        await run_in_threadpool(run_page.do, shelf, tasks, run, verb)
        place = "/chat" if verb == "serve" else "/run"
        return RedirectResponse(f"{place}?{urlencode({'run': run})}#tasks", 303)

    @app.post("/task")
    async def task(request: Request) -> Response:
        form = await form_of(request)
        id, what = form.get("id", [""])[0], form.get("what", [""])[0]
        found = await run_in_threadpool(tasks.find, id)
        if found is None:
            raise FinetuneError(f"{id}: no such task; it may have been removed")
        await run_in_threadpool(run_page.change, tasks, found, what)
        back = f"/run?{urlencode({'run': found.run})}" if found.run in shelf.watches() else "/"
        return RedirectResponse(back, 303)

    return app
