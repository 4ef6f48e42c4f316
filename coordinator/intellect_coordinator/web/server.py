"""The web page, its JSON and Prometheus metrics; a process of its own that only reads.

    GET /             the page                      GET /api/status    what status.json has
    GET /api/cases    slashing cases                GET /metrics       Prometheus text format 0.0.4
    GET /api/submissions?node=&state=&limit=        GET /api/submissions/<id>

It opens the database for reading and answers nothing but GET, so whoever reaches it can change nothing. It
listens on the loopback address unless told otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from sqlalchemy import Connection, create_engine, event, select
from sqlalchemy.engine import Engine

from intellect_protocol.errors import PreflightError, WalletError
from intellect_protocol.keys import address_bytes

from .. import schema, submissions
from ..case_views import case_views
from ..status import snapshot

T = TypeVar("T")

_MAX_LISTED = 500
_MAX_STATUS_BYTES = 8 << 20
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def reading_engine(url: str) -> Engine:
    """An SQLAlchemy engine that cannot write (SQLite: `PRAGMA query_only`)."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def connected(connection: Any, _record: Any) -> None:
            connection.execute("PRAGMA query_only = ON")

    return engine


class Views:
    """Handlers over one database."""

    def __init__(self, engine: Engine, data_dir: Path | None) -> None:
        self._engine = engine
        self._data_dir = data_dir

    async def page(self, _request: web.Request) -> web.Response:
        text = resources.files(__package__).joinpath("static/index.html").read_text(encoding="utf-8")
        return web.Response(text=text, content_type="text/html", headers=_HEADERS)

    async def status(self, _request: web.Request) -> web.Response:
        content = await self._read(snapshot)
        return _json({**content, **await asyncio.to_thread(self._live)})

    def _live(self) -> dict[str, Any]:
        """What only the running coordinator knows (head, who was heard of), from its status file."""
        if self._data_dir is None:
            return {}
        try:
            with (self._data_dir / "status.json").open("rb") as file:
                content = msgspec.json.decode(file.read(_MAX_STATUS_BYTES), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            return {}
        return {key: content[key] for key in ("head", "nodes", "pid") if key in content}

    async def cases(self, _request: web.Request) -> web.Response:
        return _json([msgspec.to_builtins(view) for view in await self._read(case_views)])

    async def submissions(self, request: web.Request) -> web.Response:
        table = schema.submissions
        limit = _number(request.query.get("limit", "100"))
        query = select(table).order_by(table.c.id.desc()).limit(min(max(limit, 1), _MAX_LISTED))
        if "node" in request.query:
            try:
                query = query.where(table.c.node == address_bytes(request.query["node"]))
            except WalletError as error:
                raise web.HTTPBadRequest(text=str(error)) from error
        if "state" in request.query:
            query = query.where(table.c.state == request.query["state"])
        rows = await self._read(lambda connection: connection.execute(query).all())
        return _json([submissions.summary(row) for row in rows])

    async def submission(self, request: web.Request) -> web.Response:
        wanted = _number(request.match_info["id"])

        def read(connection: Connection) -> dict[str, Any] | None:
            row = submissions.get(connection, wanted)
            if row is None:
                return None
            notes = submissions.findings_of(connection, [wanted]).get(wanted, [])
            status = submissions.status_of(row, notes)
            return {
                **submissions.summary(row),
                "times_ms": status.times_ms,
                "findings": [msgspec.to_builtins(note) for note in notes],
            }

        found = await self._read(read)
        if found is None:
            raise web.HTTPNotFound(text="no such submission")
        return _json(found)

    async def metrics(self, _request: web.Request) -> web.Response:
        content = await self._read(snapshot)
        return web.Response(body=prometheus(content).encode(), content_type="text/plain", headers=_HEADERS)

    async def _read(self, step: Callable[[Connection], T]) -> T:
        def run() -> T:
            with self._engine.connect() as connection, connection.begin():
                return step(connection)

        return await asyncio.to_thread(run)


def prometheus(content: dict[str, Any]) -> str:
    """A snapshot in the Prometheus text exposition format."""
    lines = [
        "# HELP intellect_submissions Submissions by state.",
        "# TYPE intellect_submissions gauge",
        *(
            f'intellect_submissions{{state="{state}"}} {content[state]}'
            for state in ("accepted", "rejected", "inconclusive", "pending")
        ),
        "# HELP intellect_refusals Refused submissions by reason code.",
        "# TYPE intellect_refusals gauge",
        *(
            f'intellect_refusals{{code="{_label(code)}"}} {count}'
            for code, count in sorted(content["reasons"].items())
        ),
        "# HELP intellect_cases Slashing cases by state.",
        "# TYPE intellect_cases gauge",
        *(
            f'intellect_cases{{state="{_label(state)}"}} {count}'
            for state, count in sorted(Counter(case["status"] for case in content["cases"]).items())
        ),
        "# HELP intellect_jobs Validator jobs that wait or are being done.",
        "# TYPE intellect_jobs gauge",
        *(
            f'intellect_jobs{{kind="{_label(kind)}"}} {count}'
            for kind, count in sorted(content["jobs"].items())
        ),
        "# HELP intellect_committed_versions Versions whose work root is on the ledger.",
        "# TYPE intellect_committed_versions gauge",
        f"intellect_committed_versions {content['committed_versions']}",
    ]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(text: str) -> int:
    if not text.isdigit() or len(text) > 18:
        raise web.HTTPBadRequest(text="not a number")
    return int(text)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=_HEADERS)


def application(engine: Engine, data_dir: Path | None) -> web.Application:
    """The routes over one database."""
    views = Views(engine, data_dir)
    app = web.Application(client_max_size=1024)
    app.router.add_get("/", views.page)
    app.router.add_get("/api/status", views.status)
    app.router.add_get("/api/cases", views.cases)
    app.router.add_get("/api/submissions", views.submissions)
    app.router.add_get("/api/submissions/{id}", views.submission)
    app.router.add_get("/metrics", views.metrics)
    return app


def run_web(
    database: str, data_dir: Path | None, host: str, port: int, *, until_stdin_closes: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM, or until standard input ends (so as not to outlive a parent).

    Raises:
        PreflightError: the port is taken.
    """
    engine = reading_engine(database)
    try:
        asyncio.run(_serve(application(engine, data_dir), host, port, until_stdin_closes))
    finally:
        engine.dispose()


async def _serve(app: web.Application, host: str, port: int, until_stdin_closes: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_stdin_closes:
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), sys.stdin.buffer)
        waiting = asyncio.create_task(reader.read())
        waiting.add_done_callback(lambda _: stop.set())
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise PreflightError(
                f"port {port} of {host} cannot be used: {error.strerror or error}"
            ) from error
        print(f"web page at http://{host}:{runner.addresses[0][1]}/", file=sys.stderr, flush=True)
        await stop.wait()
    finally:
        with contextlib.suppress(Exception):
            await runner.cleanup()
