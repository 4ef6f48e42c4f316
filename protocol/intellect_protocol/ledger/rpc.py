"""A web3 provider with time-outs, size limits and fail-over between several URLs.

A URL that does not answer, or answers with something else than JSON-RPC, is left for the next one; the
one that answered last is asked first. Which errors are answers and which are failures matters: a revert
is an answer, and asking somebody else would only hide it.

Synchronous, for use in threads: web3's asynchronous side does not run under trio. Every request ends by
itself within `timeout_s` per URL.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import urllib3
from web3.providers import BaseProvider

from ..errors import ConfigError, UnreachableError, WireError
from ..wire import decode_json

MAX_ANSWER_BYTES = 32 << 20
# JSON-RPC codes by which a node says that it cannot serve now, not that the request is wrong.
_OVERLOADED = frozenset({-32005, -32097, 429})


class FailoverProvider(BaseProvider):  # type: ignore[misc]
    """Asks one chain through several URLs."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float = 5.0) -> None:
        """
        Raises:
            ConfigError: no URL, or one that is not http(s).
        """
        super().__init__()
        if not urls:
            raise ConfigError("no RPC URL is configured")
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"not an http(s) URL of a chain RPC: {redacted(url)}")
        self._urls = tuple(urls)
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._pool = urllib3.PoolManager(maxsize=16, retries=False)

    @property
    def longest_call_s(self) -> float:
        """Seconds after which any request has ended."""
        return self._timeout_s * 2 * len(self._urls)

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def make_request(self, method: str, params: Any) -> dict[str, Any]:
        """The JSON-RPC answer of the first URL that gives one.

        Raises:
            UnreachableError: none did.
        """
        reasons = []
        for url in self._urls:
            try:
                answer = self._post(url, method, params)
            except UnreachableError as error:
                reasons.append(f"{redacted(url)}: {error}")
                continue
            if url != self._urls[0]:
                # Threads may race here: the order is a preference, the set stays the same.
                self._urls = (url, *(other for other in self._urls if other != url))
            return answer
        raise UnreachableError("the chain does not answer (" + "; ".join(reasons) + ")")

    def _post(self, url: str, method: str, params: Any) -> dict[str, Any]:
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        deadline = time.monotonic() + self._timeout_s
        try:
            response = self._pool.request(
                "POST",
                url,
                body=json.dumps(request).encode(),
                headers={"Content-Type": "application/json"},
                timeout=self._timeout_s,
                preload_content=False,
                redirect=False,
            )
            content = bytearray()
            try:
                while piece := response.read1(1 << 16):
                    content += piece
                    if len(content) > MAX_ANSWER_BYTES:
                        raise UnreachableError("answer too large")
                    if time.monotonic() > deadline:
                        raise UnreachableError(f"no whole answer within {self._timeout_s:g} s")
            except BaseException:
                response.close()
                raise
            response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(type(error).__name__) from error
        try:
            answer = decode_json(bytes(content), max_bytes=MAX_ANSWER_BYTES)
        except WireError as error:
            raise UnreachableError(f"HTTP {response.status}, not JSON") from error
        if not isinstance(answer, dict) or ("result" not in answer and "error" not in answer):
            raise UnreachableError(f"HTTP {response.status}, not a JSON-RPC answer")
        if answer.get("id") not in (request["id"], None):
            raise UnreachableError("answer to another request")
        error_member = answer.get("error")
        if isinstance(error_member, dict) and error_member.get("code") in _OVERLOADED:
            raise UnreachableError("overloaded")
        return answer


def redacted(url: str) -> str:
    """Scheme, host and port of an RPC URL: its path and query often hold an API key."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{parts.hostname or '?'}{port}"
