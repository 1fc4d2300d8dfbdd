"""The bench's server: on this machine alone, for the browser that has its token."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from t0repro.browse.draft import Draft, Finding, check_draft, find_faults, new_draft
from t0repro.browse.pages import MOST_ROWS, ROWS, Pages, asset
from t0repro.browse.shown_rows import ShownRow, show_rows
from t0repro.errors import UserError

HOST = "127.0.0.1"
PORT = 8765
"""The port unless it is taken: a browser keeps drafts by address."""
_MOST_BYTES = 1_000_000  # of a request
_HEADERS = {
    # What is shown comes from strangers' templates and rows: even unescaped, it could do nothing.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_FIELDS = {"draft": dict, "dataset": str, "like": str, "split": str, "start": int}
_TYPES = {"browse.css": "text/css", "browse.js": "text/javascript"}


class Guard:
    """Lets in only requests of the browser that came with the token, from the bench's own pages.

    The first address has the token; after that, a cookie has it.
    Another site can neither send that cookie (SameSite) nor reach the server by a name of its own
    (Host), and its forms and scripts are refused (Origin).

    Args:
      app: The application.
      token: The token.
      port: The server's port.
    """

    def __init__(self, app: ASGIApp, token: str, port: int):
        self.app, self.token = app, token
        self.hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        self.cookie = f"t0repro-{port}"  # a browser sends one port's cookies to all others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers or passes on one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request, headers = Request(scope), dict(_HEADERS)
        refused = self._refuse(request)
        if refused is None and "token" in request.query_params:
            headers["set-cookie"] = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in headers.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await (refused or self.app)(scope, receive, send_with_headers)

    def _refuse(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if host not in self.hosts:
            return PlainTextResponse("Not this server's name.", 421)
        origin = request.headers.get("origin")
        if origin not in (
            (f"http://{host}",) if request.method == "POST" else (None, f"http://{host}")
        ):
            return PlainTextResponse("Not from this page.", 403)
        given = request.query_params.get("token") or request.cookies.get(self.cookie, "")
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            what = "Open the address that t0repro browse printed, with its token."
            return PlainTextResponse(what, 403)
        return None


def make_app(pages: Pages, token: str, port: int) -> ASGIApp:
    """The application behind its guard."""

    def prompts(request: Request) -> Response:
        del request
        return HTMLResponse(pages.prompts())

    def datasets(request: Request) -> Response:
        del request
        return HTMLResponse(pages.datasets())

    def dataset(request: Request) -> Response:
        name = request.query_params.get("name", "")
        return HTMLResponse(pages.dataset(pages.bench.find_dataset(name)))

    def measured(request: Request) -> Response:
        name = request.query_params.get("dataset", "")
        return HTMLResponse(pages.dataset_cells(pages.bench.find_dataset(name)))

    def prompt(request: Request) -> Response:
        task = pages.bench.find(request.query_params.get("name", ""))
        split = request.query_params.get("split")
        return HTMLResponse(pages.prompt(task, split, _number(request, "start", 0)))

    def new(request: Request) -> Response:
        name = pages.bench.find_dataset(request.query_params.get("dataset", ""))
        return HTMLResponse(pages.new_prompt(name, new_draft(pages.bench, name)))

    def compare(request: Request) -> Response:
        asked, labels = request.query_params, pages.models.labels if pages.models else [""]
        first = pages.bench.find(asked.get("a", ""))
        others = pages.bench.tasks_of((first.rows.dataset, first.rows.subset))
        # By default two models if there are two, else two prompts.
        other = first if len(labels) > 1 else next((x for x in others if x is not first), first)
        second = pages.bench.find(asked["b"]) if "b" in asked else other
        models = asked.get("model_a", labels[0]), asked.get("model_b", labels[-1])
        if "model_b" not in asked and second is not first:
            models = labels[0], labels[0]
        return HTMLResponse(
            pages.comparison(
                (first, second if second in others else other),
                models,
                asked.get("split"),
                _number(request, "start", 0),
                min(_number(request, "count", ROWS), MOST_ROWS),
                "different" in asked,
            )
        )

    # The page asks for a draft's rows, then for their scores: they are rendered once.
    rendered: tuple[Mapping[str, Any], list[ShownRow], list[Finding]] = {}, [], []

    def rows(asked: Mapping[str, Any]) -> Response:
        nonlocal rendered
        scored, asked = bool(asked.get("scored")), {**asked, "scored": None}
        draft = Draft.read(asked["draft"])
        name, like = pages.bench.find_dataset(asked["dataset"]), asked["like"]
        known = pages.bench.find(like) if like else None
        faults = find_faults(draft)
        if faults:
            return HTMLResponse(pages.render("findings.html", findings=faults))
        is_edited = known is None or draft != Draft.of(known.rows.template, draft.base)
        task = known
        if task is None or is_edited:
            task = pages.bench.describe(name, draft.template(), known)
        split, start = asked["split"], asked["start"]
        if split not in task.rows.available_splits():
            return HTMLResponse(pages.no_rows())
        known_asked, shown, findings = rendered
        if not scored or known_asked != asked:
            shown = show_rows(task, split, start, ROWS)
            findings = check_draft(draft, task, shown)
            rendered = asked, shown, findings
        scores, faults = pages.score(task, shown) if scored else ([], [])
        findings = [*findings, *faults]
        return HTMLResponse(pages.rows(task, split, start, findings, shown=shown, scored=scores))

    def save(asked: Mapping[str, Any]) -> Response:
        draft = Draft.read(asked["draft"])
        if faults := find_faults(draft):
            return HTMLResponse(pages.render("findings.html", findings=faults), 422)
        name = pages.bench.find_dataset(asked["dataset"])
        task = pages.bench.save(name, draft.template(), draft.base or None)
        return PlainTextResponse(f"/prompt?name={quote(task.prompt.name)}")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _TYPES:
            return PlainTextResponse("There is no such file.", 404)
        return Response(asset(name), media_type=_TYPES[name])

    views = {
        "/": prompts,
        "/datasets": datasets,
        "/dataset": dataset,
        "/measured": measured,
        "/prompt": prompt,
        "/new": new,
        "/compare": compare,
        "/static/{name}": static,
    }

    def show(view: Callable[[Request], Response]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            try:
                return view(request)
            except UserError as error:
                return HTMLResponse(pages.error(error), 404)

        return answer

    def take(action: Callable[[Mapping[str, Any]], Response]) -> Any:
        async def answer(request: Request) -> Response:
            # In a thread, which goes on when the browser is closed.
            return await run_in_threadpool(_do, action, pages, await _read(request))

        return answer

    routes = [
        *(Route(path, show(view)) for path, view in views.items()),
        Route("/rows", take(rows), methods=["POST"]),
        Route("/save", take(save), methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), token, port)


def _number(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name, "")
    return min(int(value), 2**31) if value.isascii() and value.isdecimal() else default


async def _read(request: Request) -> bytes:
    """A request's body; b"" if it is too long."""
    body, size = b"", 0
    async for part in request.stream():
        # To the end, or the browser would see a broken connection in place of an answer.
        size += len(part)
        if size <= _MOST_BYTES:
            body += part
    return body if size <= _MOST_BYTES else b""


def _do(action: Callable[[Mapping[str, Any]], Response], pages: Pages, body: bytes) -> Response:
    """What an action answers to a body of JSON, or why it cannot."""
    try:
        asked = json.loads(body)
        if wrong := [name for name, kind in _FIELDS.items() if not isinstance(asked[name], kind)]:
            raise TypeError(wrong)
        asked["start"] = min(max(asked["start"], 0), 2**31)
    except (ValueError, TypeError, KeyError, RecursionError):
        return PlainTextResponse("Not what the page sends.", 400)
    try:
        return action(asked)
    except UserError as error:
        return HTMLResponse(pages.render("fault.html", error=error), 422)


def serve(pages: Pages, port: int | None, announce: Callable[[str], None]) -> None:
    """Serves the bench until Ctrl-C.

    Args:
      pages: The pages.
      port: The port; None for `PORT`, or any other if it is taken.
      announce: Called with the address when the server listens.

    Raises:
      UserError: If the port that was asked for is taken.
    """
    listener = _listen(port)
    with listener:
        bound, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        app = make_app(pages, token, bound)
        # No access log: its lines would have the token.
        settings = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        with contextlib.suppress(KeyboardInterrupt):
            announce(f"http://{HOST}:{bound}/?token={token}")
            uvicorn.Server(settings).run(sockets=[listener])


def _listen(port: int | None) -> socket.socket:
    tried = [PORT, 0] if port is None else [port]
    for each in tried:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, each))
            listener.listen()
            return listener
        except OSError:
            listener.close()
    raise UserError(
        f"Port {port} is taken.", where="--port", fix="Name another, or none for any that is free."
    )
