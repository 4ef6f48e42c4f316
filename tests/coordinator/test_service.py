"""The coordinator's door on the real network: a node, a validator and a stranger knock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import trio
from coordinator_site import acceptance, batch_of, describe, plain_unit, site_run
from devchain_process import DevchainProcess
from world import COORDINATOR, DEPLOYER, OWNER, PARAMETERS, PUBLISHER, VALIDATORS

from intellect_coordinator.job_desk import DeskLimits
from intellect_coordinator.service import Coordinator, ServiceOptions, open_coordinator
from intellect_protocol.checkpoint import checkpoint_hash, sign_manifest
from intellect_protocol.errors import RefusedError, UsageError, WalletError
from intellect_protocol.keys import LocalSigner, PeerKey, peer_id_text, verdict_digest, work_digest
from intellect_protocol.ledger.chain import Chain
from intellect_protocol.ledger.client import Ledger
from intellect_protocol.ledger.deployment import deploy
from intellect_protocol.ledger.devkeys import development_signer
from intellect_protocol.ledger.rpc import FailoverProvider
from intellect_protocol.ledger.sending import TransactionQueue
from intellect_protocol.messages import (
    Announcement,
    GetEvidence,
    GetEvidenceResult,
    GetVerdicts,
    GetVerdictsResult,
    Heartbeat,
    HeartbeatResult,
    JobKind,
    Receipt,
    SubmissionState,
    Submit,
    ValidatorJob,
    ValidatorJobResult,
    Verdict,
    VerdictResult,
)
from intellect_protocol.network.swarm import Swarm, SwarmOptions, open_swarm
from intellect_protocol.rollouts import write_unit
from intellect_protocol.run import RunConfig
from intellect_protocol.wire import encode, sha256

NODE = development_signer(10)
NODE_PEER = PeerKey(b"\x05" * 32)


@dataclass
class Town:
    """A run on a chain in a process of its own."""

    folder: Path
    config: RunConfig
    checkpoint: bytes
    manifest_bytes: int

    def announcement(self) -> Announcement:
        from intellect_protocol.keys import announcement_digest

        run_id = self.config.run_id
        digest = announcement_digest(run_id, 0, self.checkpoint, self.manifest_bytes)
        return Announcement(run_id, 0, self.checkpoint, self.manifest_bytes, PUBLISHER.sign_digest(digest))


async def build_town(folder: Path, url: str, model: Path) -> Town:
    """Contracts, a bound and staked node, and version 0 on the ledger."""
    queue = TransactionQueue(Chain(FailoverProvider([url])), folder / "state")
    deployment = await deploy(queue, DEPLOYER, PARAMETERS)
    queue.close()
    peer = PeerKey.load_or_create(folder / "coordinator" / "peer.key")
    base = site_run(deployment.contracts, deployment.chain_id)
    with trio.socket.socket() as probe:
        await probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id_text(peer.peer_id)}"
    revision = msgspec.structs.replace(base.revision, bootstrap=[address], rpc_urls=[url])
    config = RunConfig(base.terms, revision).signed(COORDINATOR)
    signed = sign_manifest(describe(model, config.run_id, 0), PUBLISHER)
    checkpoint = checkpoint_hash(signed.manifest)
    ledger = Ledger([url], deployment, folder / "state")
    for key in (OWNER, COORDINATOR):
        await ledger.mint_token(DEPLOYER, key.address, 10_000)
    await ledger.stake(OWNER, 1_000)
    await ledger.open_run(COORDINATOR, config.run_id, PUBLISHER.address)
    await ledger.bind_node(OWNER, NODE, NODE_PEER.peer_id)
    await ledger.record_checkpoint(PUBLISHER, config.run_id, 0, checkpoint)
    ledger.close()
    return Town(folder, config, checkpoint, len(signed.manifest))


@asynccontextmanager
async def coordinator_of(town: Town) -> AsyncIterator[Coordinator]:
    """The coordinator, running, with version 0 as its head."""
    options = ServiceOptions(
        run=town.config,
        signer=COORDINATOR,
        data_dir=town.folder / "coordinator",
        batches=town.folder / "batches",
        listen=[town.config.revision.bootstrap[0].rpartition("/p2p/")[0]],
        desk=DeskLimits(wait_s=0.2),
    )
    async with open_coordinator(options) as coordinator, trio.open_nursery() as nursery:
        await coordinator._swarm.heads._consider(town.announcement())
        nursery.start_soon(coordinator.run)
        yield coordinator
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def peer_of(
    town: Town, name: str, role: str, key: PeerKey, signer: LocalSigner
) -> AsyncIterator[Swarm]:
    options = SwarmOptions(
        role=role,
        data_dir=town.folder / name,
        config=town.config,
        peer_key=key,
        signer=signer,
        listen=["/ip4/127.0.0.1/tcp/0"],
        require_bootstrap=False,
    )
    async with open_swarm(options) as swarm:
        yield swarm


async def test_work_travels_from_a_node_over_the_door_and_a_validator_to_the_trainer(
    tmp_path: Path, model_folder: Path
) -> None:
    chain = await trio.to_thread.run_sync(DevchainProcess, tmp_path / "chain")
    try:
        with trio.fail_after(240):
            town = await build_town(tmp_path, chain.url, model_folder)
            await visit(town)
    finally:
        await trio.to_thread.run_sync(chain.kill)


async def visit(town: Town) -> None:
    class Site:
        config, checkpoints = town.config, {0: town.checkpoint}

    unit = plain_unit(Site, 0)  # type: ignore[arg-type]
    file = write_unit(unit)
    file_hash = sha256(file)
    digest = work_digest(town.config.run_id, 0, town.checkpoint, 0, file_hash, len(file))
    message = Submit(0, town.checkpoint, 0, file_hash, len(file), NODE.sign_digest(digest))

    validator_key = PeerKey.create()
    async with (
        peer_of(town, "node", "node", NODE_PEER, NODE) as node,
        peer_of(town, "validator", "validator", validator_key, VALIDATORS[0]) as validator,
    ):
        async with coordinator_of(town):
            receipt, _ = await node.call_coordinator(message, Receipt, body=file, deadline_s=60)
            assert receipt.is_signed_by(COORDINATOR.address)
            beat, _ = await node.call_coordinator(Heartbeat("generating", 0, {}), HeartbeatResult)
            assert (beat.next_index, beat.notices) == (1, [])
            assert beat.announcement is not None
            with pytest.raises(RefusedError, match="not_a_validator"):
                await node.call_coordinator(ValidatorJob([JobKind.JUDGE]), ValidatorJobResult)
            with pytest.raises(RefusedError, match="unknown_hash"):
                await node.call_coordinator(GetEvidence(file_hash), GetEvidenceResult)

        # The coordinator has gone and comes back: what it gave a receipt for is still there.
        async with coordinator_of(town):
            again, _ = await node.call_coordinator(message, Receipt, body=file, deadline_s=60)
            assert again == receipt
            job, body = await validator.call_coordinator(
                ValidatorJob([JobKind.JUDGE]), ValidatorJobResult, max_body_bytes=1 << 20, deadline_s=60
            )
            assert body == file
            verdict, batch = acceptance(batch_of(Site, unit, file, VALIDATORS[0]))  # type: ignore[arg-type]
            content = encode(verdict)
            signature = VALIDATORS[0].sign_digest(verdict_digest(town.config.run_id, job.job_id, content))
            stored, _ = await validator.call_coordinator(
                Verdict(job.job_id, content, signature), VerdictResult, body=batch
            )
            assert stored.stored
            result, _ = await node.call_coordinator(GetVerdicts(0), GetVerdictsResult)
            assert [entry.state for entry in result.entries] == [SubmissionState.ACCEPTED]
            name = f"{NODE.address_bytes.hex()}-000000.parquet"
            assert (town.folder / "batches" / "v00000000" / name).exists()
            status = town.folder / "coordinator" / "status.json"
            while not status.exists() or json.loads(status.read_bytes())["accepted"] != 1:  # noqa: ASYNC110
                await trio.sleep(0.1)
            with pytest.raises(UsageError, match="another coordinator"):
                async with coordinator_of(town):
                    pass


async def test_another_key_than_the_runs_coordinator_is_refused(tmp_path: Path) -> None:
    config = site_run({"NodeRegistry": COORDINATOR.address}, 1)
    options = ServiceOptions(
        run=config, signer=OWNER, data_dir=tmp_path, batches=tmp_path / "batches", listen=[]
    )
    with pytest.raises(WalletError):
        async with open_coordinator(options):
            pass
