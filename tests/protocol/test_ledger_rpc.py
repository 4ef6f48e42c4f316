"""The RPC provider leaves for the next URL whoever does not answer, and nobody who does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from intellect_protocol.errors import ConfigError, LedgerError, UnreachableError
from intellect_protocol.ledger import rpc
from intellect_protocol.ledger.chain import Chain
from intellect_protocol.ledger.rpc import FailoverProvider

Answer = Callable[[dict[str, object], BaseHTTPRequestHandler], None]


@contextmanager
def _server(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """URL of a server that answers each request with `answer`, and the methods it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request["method"])
            answer(request, self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _reply(handler: BaseHTTPRequestHandler, content: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def _good(request: dict[str, object], handler: BaseHTTPRequestHandler) -> None:
    _reply(handler, json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": "0x4d"}).encode())


def _garbage(request: dict[str, object], handler: BaseHTTPRequestHandler) -> None:
    _reply(handler, b"<html>", 502)


def _not_rpc(request: dict[str, object], handler: BaseHTTPRequestHandler) -> None:
    _reply(handler, b'["0x4d"]')


def _other_id(request: dict[str, object], handler: BaseHTTPRequestHandler) -> None:
    _reply(handler, json.dumps({"id": 10**9, "result": "0x1"}).encode())


def _overloaded(request: dict[str, object], handler: BaseHTTPRequestHandler) -> None:
    _reply(handler, json.dumps({"id": request["id"], "error": {"code": -32005, "message": "slow"}}).encode())


def _reverting(request: dict[str, object], handler: BaseHTTPRequestHandler) -> None:
    error = {"code": 3, "message": "execution reverted", "data": "0x"}
    _reply(handler, json.dumps({"id": request["id"], "error": error}).encode())


def _huge(request: dict[str, object], handler: BaseHTTPRequestHandler) -> None:
    _reply(handler, b" " * 4096)


@pytest.mark.parametrize("bad", [_garbage, _not_rpc, _other_id, _overloaded])
def test_what_is_no_answer_is_left_for_the_next_url_for_good(bad: Answer) -> None:
    with _server(bad) as (first, asked_first), _server(_good) as (second, asked_second):
        provider = FailoverProvider([first, second])
        chain = Chain(provider)
        assert chain.chain_id() == 77
        assert chain.chain_id() == 77
        assert (len(asked_first), len(asked_second)) == (1, 2)
        provider.close()


def test_a_black_hole_is_left_after_its_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole, _server(_good) as (good, _):
        port = hole.getsockname()[1]
        provider = FailoverProvider([f"http://127.0.0.1:{port}", good], timeout_s=0.2)
        assert Chain(provider).chain_id() == 77
        provider.close()


def test_a_revert_is_an_answer_and_nobody_else_is_asked() -> None:
    with _server(_reverting) as (first, _), _server(_good) as (second, asked):
        provider = FailoverProvider([first, second])
        with pytest.raises(LedgerError):
            Chain(provider).chain_id()
        assert asked == []
        provider.close()


def test_an_answer_is_read_up_to_the_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_ANSWER_BYTES", 1000)
    with _server(_huge) as (url, _):
        provider = FailoverProvider([url])
        with pytest.raises(UnreachableError, match="too large"):
            Chain(provider).chain_id()
        provider.close()


def test_when_nobody_answers_the_error_names_all_and_shows_no_api_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    provider = FailoverProvider(
        [f"http://127.0.0.1:{port}/v3/SECRET", f"http://127.0.0.1:{port}/?key=SECRET"]
    )
    with pytest.raises(UnreachableError) as caught:
        Chain(provider).chain_id()
    assert str(caught.value).count(f"127.0.0.1:{port}") == 2
    assert "SECRET" not in str(caught.value)
    provider.close()


@pytest.mark.parametrize("urls", [[], ["ftp://a"], ["127.0.0.1:8545"], ["http://"]])
def test_urls_that_are_none_are_a_configuration_error(urls: list[str]) -> None:
    with pytest.raises(ConfigError):
        FailoverProvider(urls)
