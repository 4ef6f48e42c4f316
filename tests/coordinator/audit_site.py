"""Evidence about units of a run with a real environment and tokenizer, made without a chain."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
from example_unit import LocalScorer, tiny_run, write_tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from world import COORDINATOR, OWNER, PUBLISHER, VALIDATORS

from intellect_coordinator.evidence import FORMAT, Evidence, write_evidence
from intellect_coordinator.judging import UnitClaims
from intellect_protocol.assignment import stream_seed
from intellect_protocol.checkpoint import (
    Probe,
    SignedManifest,
    build_manifest,
    checkpoint_hash,
    sign_manifest,
)
from intellect_protocol.engines.base import Completion, GenerateRequest
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.environments.tasks import load_tasks
from intellect_protocol.keys import LocalSigner, verdict_digest, work_digest
from intellect_protocol.ledger.artefacts import CONTRACTS, TOKEN
from intellect_protocol.messages import JudgeVerdict
from intellect_protocol.rollouts import EngineNote, Rollout, RolloutUnit, UnitMeta, write_unit
from intellect_protocol.run import EnvironmentTerms, KeyTerms, LedgerTerms, RunConfig, RunTerms
from intellect_protocol.validation.context import UnitContext
from intellect_protocol.validation.findings import to_notes
from intellect_protocol.validation.pipeline import validate_unit
from intellect_protocol.wire import encode, sha256
from intellect_protocol.work_file import judge_job_id

NODE = LocalSigner(b"\x33" * 32)
VALIDATOR = VALIDATORS[0]
BLOCK_HASH = b"\xb0" * 32
VERSION, INDEX = 3, 0
SECRET = b"secret of one verdict"


def write_policy(folder: Path, seed: int) -> Path:
    """The tiny model with a character tokenizer."""
    write_tiny_model(folder, seed)
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


class AuditSite:
    """A run and a policy; makes units, verdicts and bundles."""

    def __init__(self, policy: Path, *, name: str = "example") -> None:
        self.policy = policy
        base = tiny_run()
        tokenizer = (policy / "tokenizer.json").read_bytes()
        terms = {name: getattr(base.terms, name) for name in RunTerms.__struct_fields__}
        terms["model"] = msgspec.structs.replace(base.terms.model, tokenizer_hash=sha256(tokenizer).hex())
        terms["name"] = name
        terms["ledger"] = LedgerTerms(31337, dict.fromkeys((*CONTRACTS, TOKEN), COORDINATOR.address))
        terms["environments"] = [EnvironmentTerms("sort_digits")]
        terms["keys"] = KeyTerms(COORDINATOR.address, PUBLISHER.address)
        terms["sampling"] = msgspec.structs.replace(base.terms.sampling, target_lengths=[])
        self.config = RunConfig(RunTerms(**terms), base.revision).signed(COORDINATOR)
        self.tasks = load_tasks(self.config.terms, policy)
        manifest = build_manifest(
            policy,
            run_id=self.config.run_id,
            version=VERSION,
            parent_version=VERSION - 1,
            probe=Probe([1, 2], [-0.5]),
            batches=[],
            created_at_ms=1,
            publisher=PUBLISHER.address,
        )
        self.signed: SignedManifest = sign_manifest(manifest, PUBLISHER)
        self.checkpoint = checkpoint_hash(self.signed.manifest)

    def claims(self, file: bytes) -> UnitClaims:
        file_hash = sha256(file)
        digest = work_digest(self.config.run_id, VERSION, self.checkpoint, INDEX, file_hash, len(file))
        return UnitClaims(
            version=VERSION,
            checkpoint_hash=self.checkpoint,
            block_hash=BLOCK_HASH,
            node=NODE.address_bytes,
            index=INDEX,
            file_hash=file_hash,
            size_bytes=len(file),
            work_signature=NODE.sign_digest(digest),
        )

    def context(self, file: bytes) -> UnitContext:
        claims = self.claims(file)
        fields = {name: getattr(claims, name) for name in claims.__struct_fields__}
        return UnitContext(run=self.config, tasks=self.tasks, secret=SECRET, **fields)

    def unit(self, engine: TorchEngine, *, temperature: float = 1.0) -> bytes:
        """The file a node makes of the unit with some engine, at the run's temperature (1) or another."""
        context = self.context(b"-")
        samples = self.config.terms.sampling.samples_per_prompt
        requests = [
            GenerateRequest(
                self.tasks.prompt_tokens(slot),
                [stream_seed(context.seed, prompt, sample) for sample in range(samples)],
                self.config.terms.sampling.max_tokens,
            )
            for prompt, slot in enumerate(context.slots)
        ]
        done: dict[tuple[int, int], Completion] = {}
        engine.generate(
            requests,
            msgspec.structs.replace(context.sampling, temperature=temperature),
            lambda prompt, sample, completion: done.__setitem__((prompt, sample), completion),
            lambda tokens: None,
        )
        rows = [
            Rollout(
                prompt,
                sample,
                slot.environment,
                slot.task_index,
                slot.target_length,
                requests[prompt].prompt,
                done[prompt, sample].tokens,
                np.array(done[prompt, sample].logprobs, dtype=np.float32),
                done[prompt, sample].finish_reason,
                self.tasks.reward(slot, done[prompt, sample].tokens),
                done[prompt, sample].proofs,
            )
            for prompt, slot in enumerate(context.slots)
            for sample in range(samples)
        ]
        note = EngineNote("torch", "0", "float32", "eager", "cpu")
        meta = UnitMeta(1, self.config.run_id, VERSION, self.checkpoint, NODE.address_bytes, INDEX, note)
        return write_unit(RolloutUnit(meta, rows))

    async def verdict(self, file: bytes, engine: TorchEngine) -> JudgeVerdict:
        """What an honest validator says about a file."""
        judgement = await validate_unit(file, self.context(file), LocalScorer(engine))
        return JudgeVerdict(
            judgement.outcome.value, judgement.fraud, to_notes(judgement.findings), b"", 0, 0, 0.1, SECRET
        )

    def bundle(self, file: bytes, verdict: JudgeVerdict, /, **changes: object) -> bytes:
        """The evidence that goes with a verdict of fraud; `changes` forge fields of it."""
        claims, content = self.claims(file), encode(verdict)
        run_id = self.config.run_id
        job_id = judge_job_id(run_id, VERSION, claims.node, INDEX, claims.file_hash, 0)
        evidence = Evidence(
            format=FORMAT,
            run_config=self.config.to_toml().encode(),
            manifest=self.signed.manifest,
            manifest_signature=self.signed.signature,
            block_number=7,
            block_hash=BLOCK_HASH,
            node=claims.node,
            owner=OWNER.address,
            version=VERSION,
            index=INDEX,
            file_hash=claims.file_hash,
            size_bytes=claims.size_bytes,
            work_signature=claims.work_signature,
            file=file,
            attempt=0,
            validator=VALIDATOR.address,
            verdict=content,
            verdict_signature=VALIDATOR.sign_digest(verdict_digest(run_id, job_id, content)),
        )
        return write_evidence(msgspec.structs.replace(evidence, **changes))
