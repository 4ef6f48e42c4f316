"""A development chain: Ethereum JSON-RPC over HTTP on this machine, for people without a chain.

It is not a public chain: anybody on this machine can use it, and its accounts come from a phrase that
everybody knows. It listens on the loopback address only, answers one request at a time, and survives
`kill -9` at any moment (`devchain_store.py` says how).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from intellect_protocol.errors import ConfigError, IntellectError, PreflightError, WireError
from intellect_protocol.keys import address_bytes, checksum_address
from intellect_protocol.ledger.devkeys import DEVELOPMENT_MNEMONIC
from intellect_protocol.wire import decode_json

from .devchain_evm import BLOCK_GAS_LIMIT, DevelopmentChain, RefusedTransaction, Reverted
from .devchain_json import request_of
from .devchain_store import ChainStore

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 512 * 1024
MAX_BATCH = 100
MAX_LOGS = 10_000
MAX_FEE_BLOCKS = 1024
_TIP_WEI = 10**9
_PRESENT = ("latest", "pending", "safe", "finalized", None)

BANNER = f"""\
************************ DEVELOPMENT CHAIN ************************
The keys of its accounts are public. Its tokens are worth nothing.
Never send anything of value to these addresses on any chain.
phrase: {DEVELOPMENT_MNEMONIC}
*******************************************************************"""


class RpcError(Exception):
    """A JSON-RPC error answer."""

    def __init__(self, code: int, message: str, data: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class ChainRpc:
    """The methods of JSON-RPC that web3 needs. Used by one thread."""

    def __init__(self, chain: DevelopmentChain, store: ChainStore) -> None:
        self._chain = chain
        self._store = store
        self._methods: dict[str, Callable[..., Any]] = {
            "web3_clientVersion": lambda: "intellect-devchain/1",
            "net_version": lambda: str(chain.chain_id),
            "net_listening": lambda: True,
            "eth_syncing": lambda: False,
            "eth_accounts": list,
            "eth_chainId": lambda: hex(chain.chain_id),
            "eth_blockNumber": lambda: hex(chain.head.block_number),
            "eth_gasPrice": lambda: hex(chain.head.base_fee_per_gas + _TIP_WEI),
            "eth_maxPriorityFeePerGas": lambda: hex(_TIP_WEI),
            "eth_feeHistory": self._fee_history,
            "eth_getBlockByNumber": self._block_by_number,
            "eth_getBlockByHash": self._block_by_hash,
            "eth_getBalance": lambda address, tag="latest": hex(
                chain.balance(address_bytes(address), self._number(tag))
            ),
            "eth_getCode": lambda address, tag="latest": (
                "0x" + chain.code(address_bytes(address), self._number(tag)).hex()
            ),
            "eth_getTransactionCount": self._transaction_count,
            "eth_estimateGas": lambda request, tag="latest": hex(chain.estimate_gas(request_of(request))),
            "eth_call": lambda request, tag="latest": (
                "0x" + chain.call(request_of(request), self._number(tag)).hex()
            ),
            "eth_sendRawTransaction": lambda raw: chain.send_raw(bytes.fromhex(raw.removeprefix("0x"))),
            "eth_getTransactionReceipt": lambda hash_: store.receipt(hash_.lower()),
            "eth_getTransactionByHash": lambda hash_: store.transaction(hash_.lower()),
            "eth_getLogs": self._logs,
            "evm_increaseTime": lambda seconds: hex(chain.increase_time(_integer(seconds))),
            "evm_mine": self._mine,
        }

    def answer(self, body: bytes) -> bytes:
        """The answer to the body of a request, single or batch."""
        try:
            request = decode_json(body, max_bytes=MAX_REQUEST_BYTES)
        except WireError:
            return _encoded(_error(None, RpcError(-32700, "not JSON")))
        if isinstance(request, list):
            if not 0 < len(request) <= MAX_BATCH:
                return _encoded(_error(None, RpcError(-32600, f"a batch has 1 to {MAX_BATCH} requests")))
            return _encoded([self._one(item) for item in request])
        return _encoded(self._one(request))

    def _one(self, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict):
            return _error(None, RpcError(-32600, "a request is an object"))
        identifier = request.get("id")
        try:
            return {"jsonrpc": "2.0", "id": identifier, "result": self._call(request)}
        except RpcError as error:
            return _error(identifier, error)
        except RefusedTransaction as error:
            return _error(identifier, RpcError(-32000, str(error)))
        except Reverted as error:
            return _error(identifier, RpcError(3, str(error), "0x" + error.data.hex()))
        except sqlite3.Error as error:
            return _error(identifier, RpcError(-32603, f"the chain's file cannot be used: {error}"))
        except (IntellectError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            return _error(identifier, RpcError(-32602, f"invalid parameters: {error}"))

    def _call(self, request: dict[str, Any]) -> Any:
        name, params = request.get("method"), request.get("params", [])
        method = self._methods.get(name) if isinstance(name, str) else None
        if method is None:
            raise RpcError(-32601, f"no method {str(name)[:64]}")
        if not isinstance(params, list):
            raise RpcError(-32602, "parameters are a list")
        return method(*params)

    def _number(self, tag: Any) -> int | None:
        """Block number behind a tag; None for the present."""
        number = _integer_or_none(tag)
        if number is None:
            return None
        if not 0 <= number <= self._chain.head.block_number:
            raise RpcError(-32001, f"no block {number}")
        return number

    def _known_number(self, tag: Any) -> int:
        number = self._number(tag)
        return int(self._chain.head.block_number) if number is None else number

    def _block_by_number(self, tag: Any, full: bool = False) -> dict[str, Any] | None:
        try:
            block = self._block(self._store.block(self._known_number(tag)), full)
        except RpcError:
            return None
        if tag == "pending" and block is not None:
            number, now = self._chain.head.block_number + 1, self._chain.now()
            block |= {"number": hex(number), "timestamp": hex(now), "parentHash": block["hash"], "hash": None}
            block |= {"transactions": [], "gasUsed": "0x0", "nonce": None, "logsBloom": None}
        return block

    def _block_by_hash(self, hash_: str, full: bool = False) -> dict[str, Any] | None:
        return self._block(self._store.block_by_hash(hash_.lower()), full)

    def _block(self, block: dict[str, Any] | None, full: bool) -> dict[str, Any] | None:
        if block is not None and full:
            block["transactions"] = [self._store.transaction(hash_) for hash_ in block["transactions"]]
        return block

    def _transaction_count(self, address: str, tag: Any = "latest") -> str:
        if self._number(tag) is not None:
            raise RpcError(-32602, "only the present nonce is known")
        return hex(self._chain.nonce(address_bytes(address)))

    def _fee_history(self, count: Any, newest: Any, percentiles: Any = None) -> dict[str, Any]:
        last = self._known_number(newest)
        first = max(0, last + 1 - min(max(_integer(count), 1), MAX_FEE_BLOCKS))
        blocks = [self._store.block(number) for number in range(first, last + 1)]
        fees = [block["baseFeePerGas"] for block in blocks if block is not None]
        used = [int(block["gasUsed"], 16) / BLOCK_GAS_LIMIT for block in blocks if block is not None]
        rewards = [[hex(_TIP_WEI) for _ in percentiles] for _ in fees] if percentiles else None
        history = {"oldestBlock": hex(first), "baseFeePerGas": [*fees, fees[-1]], "gasUsedRatio": used}
        return history if rewards is None else {**history, "reward": rewards}

    def _logs(self, query: dict[str, Any]) -> list[dict[str, Any]]:
        if "blockHash" in query:
            block = self._store.block_by_hash(query["blockHash"].lower())
            if block is None:
                raise RpcError(-32001, "no such block")
            first = last = int(block["number"], 16)
        else:
            head = int(self._chain.head.block_number)
            first, last = (
                head if (number := _integer_or_none(query.get(end, "latest"))) is None else number
                for end in ("fromBlock", "toBlock")
            )
        addresses = [_checksum(address) for address in _choices(query.get("address"))]
        topics = [[topic.lower() for topic in _choices(choice)] for choice in query.get("topics") or []]
        found = self._store.logs(first, last, addresses, topics, MAX_LOGS + 1)
        if len(found) > MAX_LOGS:
            raise RpcError(-32005, f"more than {MAX_LOGS} logs: ask for fewer blocks")
        return found

    def _mine(self, *_: Any) -> str:
        self._chain.mine([])
        return "0x0"


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("not a number")
    return value if isinstance(value, int) else int(value, 0)


def _integer_or_none(tag: Any) -> int | None:
    """Number behind a block tag, whether there is such a block or not; None for the present."""
    if tag in _PRESENT:
        return None
    return 0 if tag == "earliest" else min(_integer(tag), 1 << 62)


def _choices(value: Any) -> list[str]:
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    if len(items) > 64 or not all(isinstance(item, str) for item in items):
        raise ValueError("at most 64 strings")
    return items


def _checksum(address: str) -> str:
    return checksum_address(address_bytes(address))


def _error(identifier: Any, error: RpcError) -> dict[str, Any]:
    member: dict[str, Any] = {"code": error.code, "message": str(error)}
    if error.data is not None:
        member["data"] = error.data
    return {"jsonrpc": "2.0", "id": identifier, "error": member}


def _encoded(answer: Any) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()


async def _serve(
    rpc: ChainRpc, worker: ThreadPoolExecutor, port: int, started: Callable[[str], None]
) -> None:
    async def handle(request: web.Request) -> web.Response:
        # A page in a browser can post to the loopback address, but not with this content type or a
        # host name of its own.
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="application/json only")
        if (request.host or "").rsplit(":", 1)[0] not in (HOST, "localhost"):
            raise web.HTTPForbidden(text="loopback only")
        body = await request.read()
        answer = await asyncio.get_running_loop().run_in_executor(worker, rpc.answer, body)
        return web.Response(body=answer, content_type="application/json")

    application = web.Application(client_max_size=MAX_REQUEST_BYTES)
    application.router.add_post("/", handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=False)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise PreflightError(f"port {port} of {HOST} is taken: {error.strerror or error}") from error
        bound_port = runner.addresses[0][1]
        started(f"http://{HOST}:{bound_port}")
        await stop.wait()
    finally:
        await runner.cleanup()


def run_devchain(
    data_dir: Path,
    port: int,
    *,
    chain_id: int | None = None,
    clock: Callable[[], float] = time.time,
    output: Callable[[str], None] | None = None,
) -> None:
    """Serve the development chain kept in `data_dir` until SIGINT or SIGTERM.

    Args:
        port: TCP port on 127.0.0.1; 0 takes a free one.
        chain_id: id of a chain that is begun now; by default random. An existing chain keeps its own.
        output: receives the lines of the banner and, last, `development chain ID ready at URL`.

    Raises:
        ConfigError: the directory cannot be used, or another process uses it.
        PreflightError: the port is taken.
    """
    say = output or (lambda line: print(line, file=sys.stderr, flush=True))
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(data_dir / "devchain.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{data_dir}: {error.strerror or error}") from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{data_dir}: another development chain runs here") from None
        store = ChainStore(data_dir / "devchain.sqlite")
        stack.callback(store.close)
        chain = DevelopmentChain(store, clock, chain_id)
        worker = stack.enter_context(ThreadPoolExecutor(1))
        for line in BANNER.splitlines():
            say(line)
        asyncio.run(
            _serve(
                ChainRpc(chain, store),
                worker,
                port,
                lambda url: say(f"development chain {chain.chain_id} ready at {url}"),
            )
        )
