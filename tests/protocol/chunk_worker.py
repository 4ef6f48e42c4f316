"""A peer with host, store and chunk service as a process of its own, driven by lines of JSON.

Commands on standard input: {"do": "publish" | "fetch" | "link" | "report" | "quit", ...}; each is answered by
one line on standard output. `ChunkWorker` is the other end, for tests and measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import trio

from intellect_protocol.keys import PeerKey, peer_id_text


class ChunkWorker:
    """One worker process."""

    def __init__(self, folder: Path, *, bootstrap: list[str] | None = None, **options: Any) -> None:
        self.folder = folder
        setup = {"folder": str(folder), "bootstrap": bootstrap or [], **options}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.peer_id = ""
        self.address = ""
        self.pids: list[int] = []

    def ready(self) -> ChunkWorker:
        """Wait until it runs."""
        hello = self.answer()
        self.peer_id, self.address = hello["peer_id"], hello["address"]
        self.pids = [self.process.pid, hello["dataplane"]]
        return self

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest command."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the worker ended with status {self.process.wait()}")
        return dict(json.loads(line))

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Command and answer."""
        self.tell(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        """End it, however it is."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


async def main(setup: dict[str, Any]) -> None:
    from sample_checkpoints import LIMITS, PUBLISHER, RUN_ID

    from intellect_protocol.checkpoint import SignedManifest, verify_manifest
    from intellect_protocol.chunk_store import ChunkStore
    from intellect_protocol.network.addresses import parse_address
    from intellect_protocol.network.chunk_config import ChunkConfig
    from intellect_protocol.network.chunks import open_chunk_service
    from intellect_protocol.network.host import HostOptions, open_host
    from intellect_protocol.wire import decode

    folder = Path(setup["folder"])
    store = ChunkStore(folder / "store", quota_bytes=setup.get("quota", 1 << 30))
    options = HostOptions(
        peer_key=PeerKey.create(),
        data_dir=folder,
        listen=["/ip4/127.0.0.1/tcp/0"],
        bootstrap=setup["bootstrap"],
        run_id=RUN_ID,
    )
    config = ChunkConfig(**{"http_host": "127.0.0.1", **setup.get("config", {})})

    def load(path: str) -> SignedManifest:
        signed = decode(Path(path).read_bytes(), SignedManifest)
        verify_manifest(signed, RUN_ID, PUBLISHER.address, LIMITS)
        return signed

    async with (
        open_host(options) as host,
        open_chunk_service(
            host,
            store,
            run_id=RUN_ID,
            config=config,
            origin=setup.get("origin", False),
            discovery=host.discovery if setup.get("dht", True) else None,
        ) as chunks,
    ):

        def reply(**values: Any) -> None:
            print(json.dumps(values), flush=True)

        def text(counts: Any) -> dict[str, int]:
            return {peer_id_text(peer): size for peer, size in counts.items()}

        async def carry_out(command: dict[str, Any]) -> None:
            if command["do"] == "publish":
                signed = load(command["manifest"])
                manifest = verify_manifest(signed, RUN_ID, PUBLISHER.address, LIMITS)
                with await trio.to_thread.run_sync(store.admit, signed):
                    await trio.to_thread.run_sync(store.import_folder, Path(command["folder"]), manifest)
                    await chunks.publish(signed)
                reply(done=True)
            elif command["do"] == "fetch":
                providers = [parse_address(address) for address in command.get("providers", [])]
                signed = load(command["manifest"])
                cpu = time.process_time()
                report = await chunks.fetch(signed, providers)
                cpu = time.process_time() - cpu
                if "out" in command:
                    await trio.to_thread.run_sync(store.assemble, report.manifest, Path(command["out"]))
                reply(
                    seconds=report.seconds,
                    cpu_seconds=cpu,
                    bytes_from=text(report.bytes_from),
                    banned=[peer_id_text(peer) for peer in report.banned],
                )
            elif command["do"] == "report":
                reply(
                    bytes_from=text(chunks.bytes_from),
                    bytes_to=text(chunks.bytes_to),
                    linked=[peer_id_text(peer) for peer in chunks.linked_peers()],
                )

        reply(
            peer_id=peer_id_text(host.peer_id),
            address=host.addresses()[0],
            dataplane=chunks.uploads.dataplane.pid,
        )
        lines = trio.wrap_file(sys.stdin)
        while line := await lines.readline():
            command = json.loads(line)
            if command["do"] == "quit":
                break
            await carry_out(command)


if __name__ == "__main__":
    if os.environ.get("CHUNK_LOG"):
        import logging

        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("intellect_protocol.network").setLevel(logging.DEBUG)
    trio.run(main, json.loads(sys.argv[1]))
