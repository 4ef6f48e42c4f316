"""A coordinator's parts over a real database and the real contracts, with clocks that the test moves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from example_unit import CountingTasks, LocalScorer, tiny_run, write_tiny_model
from world import COORDINATOR, DEPLOYER, OWNER, PUBLISHER, VALIDATORS, World

from intellect_coordinator import jobs
from intellect_coordinator.batches import BatchStore
from intellect_coordinator.blobs import BlobStore
from intellect_coordinator.intake import Intake
from intellect_coordinator.job_desk import DeskLimits, JobDesk
from intellect_coordinator.judging import UnitClaims
from intellect_coordinator.reviews import Reviewer
from intellect_coordinator.roots import Roots
from intellect_coordinator.slashing import Slashing
from intellect_coordinator.standing import Standing
from intellect_coordinator.store import Store
from intellect_coordinator.validator_log import ValidatorLog
from intellect_protocol.assignment import stream_seed
from intellect_protocol.checkpoint import (
    Manifest,
    Probe,
    SignedManifest,
    build_manifest,
    checkpoint_hash,
    sign_manifest,
)
from intellect_protocol.engines.base import Completion, GenerateRequest
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.keys import LocalSigner, PeerKey, verdict_digest, work_digest
from intellect_protocol.ledger.devkeys import development_signer
from intellect_protocol.ledger.records import RecordedCheckpoint
from intellect_protocol.messages import (
    Announcement,
    CaseVerdict,
    FindingNote,
    JobKind,
    JudgeVerdict,
    RootVerdict,
    SubmissionState,
    Submit,
    ValidatorJob,
    ValidatorJobResult,
    Verdict,
)
from intellect_protocol.rollouts import (
    Batch,
    BatchMeta,
    BatchRow,
    EngineNote,
    Rollout,
    RolloutUnit,
    UnitMeta,
    write_batch,
    write_unit,
)
from intellect_protocol.run import KeyTerms, LedgerTerms, RunConfig, RunTerms
from intellect_protocol.validation.context import UnitContext
from intellect_protocol.validation.pipeline import Judgement, validate_unit
from intellect_protocol.wire import encode, sha256

NODE = development_signer(10)
VERSIONS = (0, 1, 2, 3, 4)
FRAUD = FindingNote(
    "sampling", "sampling_distance", "fraud", 3, 0.5, 0.1, "row 3: not what the seed draws: 0.5, limit 0.1"
)
SUSPECT = FindingNote("drift", "logprob_drift", "suspect", 1, 0.3, 0.2, "log-probs drift")


def site_run(contracts: dict[str, str], chain_id: int) -> RunConfig:
    """A run of the tiny model on a deployment: 4 prompts with 8 samples per unit."""
    base = tiny_run()
    terms = RunTerms(
        **{
            **{name: getattr(base.terms, name) for name in base.terms.__struct_fields__},
            "ledger": LedgerTerms(chain_id, contracts),
            "keys": KeyTerms(COORDINATOR.address, PUBLISHER.address),
        }
    )
    window = msgspec.structs.replace(base.revision.window, units_per_version=6, abandons_per_version=2)
    return RunConfig(terms, msgspec.structs.replace(base.revision, window=window)).signed(COORDINATOR)


class Heads:
    """What a head tracker knows, without a network."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.head: Announcement | None = None

    def set(self, version: int) -> None:
        self.head = Announcement(self._site.config.run_id, version, b"\0" * 32, 1, b"")

    async def recorded(self, version: int) -> RecordedCheckpoint | None:
        return await self._site.world.ledger.checkpoint(self._site.config.run_id, version)

    async def manifest(self, checkpoint: bytes) -> tuple[SignedManifest, Manifest]:
        return self._site.manifests[checkpoint]


class Site:
    """One coordinator; `restarted` is the same one after a kill."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.world = World(folder)
        deployment = self.world.ledger.deployment
        self.config = site_run(deployment.contracts, deployment.chain_id)
        self.manifests: dict[bytes, tuple[SignedManifest, Manifest]] = {}
        self.checkpoints: dict[int, bytes] = {}
        for version in VERSIONS:
            manifest = describe(model, self.config.run_id, version)
            signed = sign_manifest(manifest, PUBLISHER)
            self.checkpoints[version] = checkpoint_hash(signed.manifest)
            self.manifests[self.checkpoints[version]] = (signed, manifest)
        self.heads = Heads(self)
        self.heads.set(0)
        self.now_ms = self.world.now * 1000
        self.told: list[tuple[int, SubmissionState | None]] = []
        self._open()

    def _open(self) -> None:
        bell = jobs.Bell()
        self.store = Store(f"sqlite:///{self.folder / 'coordinator.sqlite'}")
        self.blobs = BlobStore(self.folder / "blobs", keep_free_bytes=0)
        self.batches = BatchStore(self.folder / "batches")
        ledger, config = self.world.ledger, self.config
        self.standing = Standing(self.store, ledger)
        common = {"clock_ms": lambda: self.now_ms}
        self.intake = Intake(
            self.store, self.blobs, self.standing, self.heads, config, COORDINATOR, bell, **common
        )
        self.desk = JobDesk(
            self.store,
            self.blobs,
            self.batches,
            self.standing,
            config,
            bell,
            concluded=self._tell_state,
            limits=DeskLimits(lease_s=30, wait_s=0.0),
            **common,
        )
        self.slashing = Slashing(
            self.store,
            self.blobs,
            ledger,
            self.heads,
            config,
            COORDINATOR,
            bell,
            concluded=self._tell,
            **common,
        )
        self.roots = Roots(self.store, self.blobs, ledger, self.heads, config, COORDINATOR, bell, **common)

    async def _tell_state(self, submission_id: int, state: SubmissionState) -> None:
        self.told.append((submission_id, state))

    async def _tell(self, submission_id: int) -> None:
        self.told.append((submission_id, None))

    async def restart(self) -> None:
        """As after kill -9: everything in memory is gone."""
        self.store.close()
        self._open()
        await self.standing.open()

    def close(self) -> None:
        self.store.close()
        self.world.close()

    def pass_time(self, seconds: int) -> None:
        """Move our clock and the chain's."""
        self.world.now += seconds
        self.now_ms += seconds * 1000

    async def populate(self) -> None:
        """Contracts, a bound and staked node, and every version on the ledger; run once per session."""
        ledger = self.world.ledger
        await ledger.mint_token(DEPLOYER, COORDINATOR.address, 10_000)
        await ledger.open_run(COORDINATOR, self.config.run_id, PUBLISHER.address)
        await ledger.bind_node(OWNER, NODE, PeerKey(b"\x05" * 32).peer_id)
        for version in VERSIONS:
            await ledger.record_checkpoint(PUBLISHER, self.config.run_id, version, self.checkpoints[version])

    # --- nodes -----------------------------------------------------------------------------------

    def submission(self, body: bytes, index: int, *, version: int = 0, node: LocalSigner = NODE) -> Submit:
        """A correctly signed submission."""
        checkpoint, file_hash = self.checkpoints[version], sha256(body)
        digest = work_digest(self.config.run_id, version, checkpoint, index, file_hash, len(body))
        return Submit(version, checkpoint, index, file_hash, len(body), node.sign_digest(digest))

    async def submit(self, body: bytes, index: int, *, version: int = 0) -> None:
        await self.intake.submit(NODE.address, self.submission(body, index, version=version), body)

    # --- validators ------------------------------------------------------------------------------

    async def claim(self, validator: LocalSigner, *kinds: JobKind) -> ValidatorJobResult:
        job, _ = await self.desk.claim(validator.address, ValidatorJob(list(kinds or JobKind)))
        return job

    async def answer(
        self,
        validator: LocalSigner,
        job_id: bytes,
        content: JudgeVerdict | CaseVerdict | RootVerdict,
        body: bytes = b"",
    ) -> None:
        await self.desk.verdict(validator.address, self.signed(validator, job_id, content), body)

    def signed(
        self, validator: LocalSigner, job_id: bytes, content: JudgeVerdict | CaseVerdict | RootVerdict
    ) -> Verdict:
        data = encode(content)
        return Verdict(job_id, data, validator.sign_digest(verdict_digest(self.config.run_id, job_id, data)))

    async def judge(self, outcome: str, *notes: FindingNote, validator: LocalSigner = VALIDATORS[0]) -> bytes:
        """Claim the next submission and say this about it (not `accepted`); returns the job's id."""
        job = await self.claim(validator, JobKind.JUDGE, JobKind.REVIEW)
        assert job.judge is not None
        await self.answer(validator, job.job_id, said(outcome, *notes))
        return job.job_id

    def reviewer(self, validator: LocalSigner, scorer: LocalScorer) -> Reviewer:
        """A validator's reviews, with a memory of its own and a shared engine."""
        log = ValidatorLog(self.folder / f"{validator.address}.sqlite")
        judge = LocalJudge(self.config, scorer)
        return Reviewer(self.config, self.world.ledger, validator, judge, log)

    async def claims(self, unit: bytes, index: int, version: int) -> UnitClaims:
        recorded = await self.heads.recorded(version)
        assert recorded is not None
        message = self.submission(unit, index, version=version)
        return UnitClaims(
            version=version,
            checkpoint_hash=recorded.checkpoint_hash,
            block_hash=recorded.block_hash,
            node=NODE.address_bytes,
            index=index,
            file_hash=message.file_hash,
            size_bytes=message.size_bytes,
            work_signature=message.work_signature,
        )


def said(outcome: str, *notes: FindingNote) -> JudgeVerdict:
    """A verdict without a batch file."""
    fraud = any(note.kind == "fraud" for note in notes)
    return JudgeVerdict(outcome, fraud, list(notes), b"", 0, 0, 0.1, b"secret")


class LocalJudge:
    """Judges with an engine in this process."""

    def __init__(self, config: RunConfig, scorer: LocalScorer) -> None:
        self._config = config
        self._scorer = scorer

    async def judge(self, file: bytes, claims: UnitClaims, secret: bytes) -> Judgement:
        return await validate_unit(file, self.context(claims, secret), self._scorer)

    def context(self, claims: UnitClaims, secret: bytes) -> UnitContext:
        fields = {name: getattr(claims, name) for name in claims.__struct_fields__}
        return UnitContext(run=self._config, tasks=CountingTasks(), secret=secret, **fields)


def describe(model: Path, run_id: bytes, version: int) -> Manifest:
    """The manifest of a model folder as some version of a run."""
    return build_manifest(
        model,
        run_id=run_id,
        version=version,
        parent_version=version - 1 if version else None,
        probe=Probe([1, 2], [-0.5]),
        batches=[],
        created_at_ms=1,
        publisher=PUBLISHER.address,
    )


def tiny_model(folder: Path, seed: int = 0) -> Path:
    return write_tiny_model(folder, seed)


async def generate(site: Site, engine: TorchEngine, index: int, version: int = 0) -> RolloutUnit:
    """What an honest node makes of a unit."""
    judge = LocalJudge(site.config, LocalScorer(engine))
    context = judge.context(await site.claims(b"-", index, version), b"")
    samples = site.config.terms.sampling.samples_per_prompt
    requests = [
        GenerateRequest(
            prompt=context.tasks.prompt_tokens(slot),
            seeds=[stream_seed(context.seed, prompt, sample) for sample in range(samples)],
            max_tokens=site.config.terms.sampling.max_tokens,
        )
        for prompt, slot in enumerate(context.slots)
    ]
    done: dict[tuple[int, int], Completion] = {}
    engine.generate(
        requests,
        context.sampling,
        lambda prompt, sample, completion: done.__setitem__((prompt, sample), completion),
        lambda tokens: None,
    )
    rows = [
        Rollout(
            prompt=prompt,
            sample=sample,
            environment=slot.environment,
            task_index=slot.task_index,
            target_length=slot.target_length,
            prompt_tokens=requests[prompt].prompt,
            completion_tokens=done[prompt, sample].tokens,
            logprobs=np.array(done[prompt, sample].logprobs, dtype=np.float32),
            finish_reason=done[prompt, sample].finish_reason,
            reward=context.tasks.reward(slot, done[prompt, sample].tokens),
            proofs=done[prompt, sample].proofs,
        )
        for prompt, slot in enumerate(context.slots)
        for sample in range(samples)
    ]
    note = EngineNote("torch", "0", "float32", "eager", "cpu")
    meta = UnitMeta(
        1, site.config.run_id, version, site.checkpoints[version], NODE.address_bytes, index, note
    )
    return RolloutUnit(meta, rows)


def forged(unit: RolloutUnit) -> RolloutUnit:
    """The unit with rewards that its completions did not earn."""
    return RolloutUnit(unit.meta, [msgspec.structs.replace(row, reward=0.987) for row in unit.rows])


def plain_unit(site: Site, index: int, version: int = 0, *, token: int = 5) -> RolloutUnit:
    """A well-formed file whose content no model made: for tests that do not judge it."""
    meta = UnitMeta(
        1,
        site.config.run_id,
        version,
        site.checkpoints[version],
        NODE.address_bytes,
        index,
        EngineNote("none", "0", "float32", "none", "cpu"),
    )
    row = Rollout(0, 0, "sort_digits", 7, 0, [2, 3], [token, 1], np.zeros(2, np.float32), "stop", 0.0, [b""])
    return RolloutUnit(meta, [row, msgspec.structs.replace(row, sample=1)])


def plain_file(site: Site, index: int, version: int = 0, *, token: int = 5) -> bytes:
    """Bytes of `plain_unit`."""
    return write_unit(plain_unit(site, index, version, token=token))


def batch_of(site: Site, unit: RolloutUnit, file: bytes, validator: LocalSigner) -> Batch:
    """What an honest validator makes of an accepted file."""
    meta = BatchMeta(
        format=1,
        run_id=site.config.run_id,
        version=unit.meta.version,
        checkpoint_hash=unit.meta.checkpoint_hash,
        node=unit.meta.node,
        index=unit.meta.index,
        file_hash=sha256(file),
        validator=validator.address,
    )
    names = BatchRow.__struct_fields__
    return Batch(meta, [BatchRow(**{name: getattr(row, name) for name in names}) for row in unit.rows])


def acceptance(batch: Batch) -> tuple[JudgeVerdict, bytes]:
    """The verdict that goes with a batch file, and the file."""
    body = write_batch(batch)
    tokens = sum(len(row.completion_tokens) for row in batch.rows)
    return JudgeVerdict("accepted", False, [], sha256(body), len(batch.rows), tokens, 0.1, b"s"), body


async def accept(site: Site, validator: LocalSigner = VALIDATORS[0]) -> bytes:
    """Claim the next plain submission and accept it; returns the job's id."""
    job = await site.claim(validator, JobKind.JUDGE)
    assert job.judge is not None
    file = site.blobs.get(job.judge.file_hash, max_bytes=1 << 20)
    assert file is not None
    from intellect_protocol.rollouts import read_unit

    unit = read_unit(file, site.desk.file_limits())
    verdict, body = acceptance(batch_of(site, unit, file, validator))
    await site.answer(validator, job.job_id, verdict, body)
    return job.job_id
