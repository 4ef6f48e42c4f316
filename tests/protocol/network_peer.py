"""A peer in a process of its own, driven over standard input; used by the network tests.

    python network_peer.py '{"data_dir": ..., "bootstrap": [...], "listen": ..., "key": hex}'

It writes one JSON object per line: first its addresses, then one answer per command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import trio

RUN_ID = b"\x11" * 32
# Where time-outs are not the subject, a busy machine must not fail a test.
PATIENT = {
    "dial_s": 30.0,
    "upgrade_s": 60.0,
    "negotiate_s": 60.0,
    "query_s": 10.0,
    "ping_s": 60.0,
    "hello_s": 60.0,
}


class Echo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class EchoResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class PeerProcess:
    """The other end of the pipe, in the test."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.pid: int = process.pid
        self.addresses: list[str] = []
        self._buffer = b""

    async def read(self) -> dict:
        assert self.process.stdout is not None
        while b"\n" not in self._buffer:
            piece = await self.process.stdout.receive_some()
            if not piece:
                raise EOFError("the peer process ended")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    async def ask(self, **command: object) -> dict:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(json.dumps(command).encode() + b"\n")
        with trio.fail_after(30):
            return await self.read()


@asynccontextmanager
async def peer_process(data_dir: Path, **options: object):
    """A running peer; killed when the block is left."""
    argument = json.dumps({"data_dir": str(data_dir), **options})
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(
                trio.run_process,
                [sys.executable, __file__, argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                check=False,
            )
        )
        peer = PeerProcess(process)
        try:
            with trio.fail_after(30):
                peer.addresses = (await peer.read())["addresses"]
            yield peer
        finally:
            if process.poll() is None:
                process.kill()
            nursery.cancel_scope.cancel()


async def main(options: dict) -> None:
    from intellect_protocol.keys import PeerKey
    from intellect_protocol.network.gossip import checkpoints_topic
    from intellect_protocol.network.host import HostOptions, open_host
    from intellect_protocol.network.limits import Timeouts
    from intellect_protocol.network.rpc_server import Call, Reply

    def say(**answer: object) -> None:
        print(json.dumps(answer), flush=True)

    async def echo(call: Call[Echo]) -> Reply:
        return Reply(EchoResult(call.payload.text), call.body.data)

    key = PeerKey(bytes.fromhex(options["key"])) if "key" in options else PeerKey.create()
    host_options = HostOptions(
        peer_key=key,
        data_dir=Path(options["data_dir"]),
        listen=options.get("listen", ["/ip4/127.0.0.1/tcp/0"]),
        bootstrap=options.get("bootstrap", []),
        run_id=RUN_ID,
        timeouts=Timeouts(**{**PATIENT, **options.get("timeouts", {})}),
    )
    stdin = trio.lowlevel.FdStream(0)
    async with open_host(host_options) as host, trio.open_nursery() as nursery:
        host.server.register(Echo, echo, max_body_bytes=1 << 20)
        received: list[str] = []

        async def listen() -> None:
            async for message in host.gossip.subscribe(checkpoints_topic(RUN_ID), lambda data: True):
                received.append(message.hex())

        nursery.start_soon(listen)
        say(addresses=host.addresses())
        buffer = b""
        async for piece in stdin:
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                command = json.loads(line)
                match command["do"]:
                    case "provide":
                        say(ok=await host.discovery.provide(bytes.fromhex(command["key"])))
                    case "publish":
                        await host.gossip.publish(checkpoints_topic(RUN_ID), bytes.fromhex(command["data"]))
                        say(ok=True)
                    case "received":
                        say(messages=received)
                    case "peers":
                        say(peers=[row.peer_id.hex() for row in host.peers()])
                    case "echo":
                        result, _ = await host.client.call(
                            bytes.fromhex(command["peer"]), Echo(command["text"]), EchoResult
                        )
                        say(text=result.text)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
