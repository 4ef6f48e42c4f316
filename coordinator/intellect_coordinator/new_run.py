"""`intellect-coordinator init`: a new run, from a checkpoint folder to contracts and a signed run.toml.

    <out>/deployment.json    where the contracts are
    <out>/run.toml           terms and first revision, signed by the coordinator's key

The contracts are deployed first because their addresses are part of the run's id. `run.toml` comes last; a
set-up that was interrupted before it is repeated with the contracts of `deployment.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from intellect_protocol.errors import ConfigError, UsageError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.run import (
    PROTOCOL_VERSION,
    AuditTerms,
    EnvironmentTerms,
    KeyTerms,
    LedgerTerms,
    ModelTerms,
    RevisionTerms,
    RunConfig,
    RunTerms,
    SamplingTerms,
    WindowTerms,
    run_id,
)
from intellect_protocol.validation.audit_share import SeedChain
from intellect_protocol.validation.limits import default_thresholds
from intellect_protocol.wire import sha256

from .presets import Preset

if TYPE_CHECKING:
    from intellect_protocol.ledger.deployment import Deployment

_MAX_FILE_BYTES = 64 << 20
_COORDINATOR_WEI = 10 * 10**18
_COORDINATOR_TOKENS = 5_000

Tell = Callable[[str], None]


class AuditChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Audit terms as the operator chooses them; the anchor follows from the coordinator's key."""

    unit_value: float  # stake tokens
    min_share: float
    probation_units: int
    safety: float


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is made from."""

    name: str
    out: Path
    rpc: list[str]
    signer: LocalSigner  # the coordinator's
    publisher: str
    validators: list[str]
    checkpoint: Path
    environments: list[EnvironmentTerms]
    preset: Preset
    bootstrap: list[str]
    chat: bool | None = None  # None: as the tokenizer has a chat template
    development: bool = False
    token: str | None = None
    window_s: int | None = None
    voting_s: int | None = None
    audit: AuditChoice | None = None  # None: every unit is audited


def parse_environment(text: str) -> EnvironmentTerms:
    """`name[*weight][:key=value,...]`, e.g. `arithmetic*2:max_term=9,operators=+`.

    Raises:
        UsageError: not of that form.
        ConfigError: no such environment, or a parameter it does not have.
    """
    from intellect_protocol.environments.registry import make

    head, _, tail = text.partition(":")
    if head == "reasoning_gym":
        task, _, tail = tail.partition(":")
        head = f"{head}:{task}"
    name, _, weight = head.partition("*")
    params: dict[str, int | float | str | bool] = {}
    for pair in filter(None, tail.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"environment {name}: {pair!r} is not key=value")
        try:
            params[key] = json.loads(value)
        except ValueError:
            params[key] = value
    if weight and not weight.isdigit():
        raise UsageError(f"environment {name}: {weight!r} is not a weight")
    make(name, params)
    return EnvironmentTerms(name, int(weight or 1), params)


def model_terms(folder: Path, chat: bool | None) -> tuple[ModelTerms, list[int]]:
    """What a checkpoint folder says about its model, and the ids of its stop tokens.

    Raises:
        ConfigError: a file is missing or lacks what is needed.
    """
    from intellect_protocol.environments.prompts import Prompts

    config = _read_json(folder / "config.json")
    try:
        tokenizer = (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise ConfigError(f"{folder / 'tokenizer.json'}: {error.strerror or error}") from error
    if chat is None:
        settings = folder / "tokenizer_config.json"
        has_template = settings.exists() and bool(_read_json(settings).get("chat_template"))
        chat = has_template or (folder / "chat_template.jinja").exists()
    try:
        terms = ModelTerms(
            architecture=str(config["architectures"][0]),
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            max_positions=int(config["max_position_embeddings"]),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            tokenizer_hash=sha256(tokenizer).hex(),
            chat=chat,
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'}: no usable {error}") from error
    return terms, Prompts(folder, chat=chat).stop_ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            plain = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return plain


def run_terms(new: NewRun, deployment: Deployment) -> RunTerms:
    """The immutable part of the run. Errors as `model_terms`."""
    model, stop_ids = model_terms(new.checkpoint, new.chat)
    sampling = new.preset
    return RunTerms(
        name=new.name,
        protocol=PROTOCOL_VERSION,
        model=model,
        environments=new.environments,
        sampling=SamplingTerms(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_ids=stop_ids,
            prompts_per_unit=sampling.prompts_per_unit,
            samples_per_prompt=sampling.samples_per_prompt,
        ),
        ledger=LedgerTerms(deployment.chain_id, dict(deployment.contracts)),
        keys=KeyTerms(new.signer.address, new.publisher),
    )


def first_revision(new: NewRun, dtype: str) -> RevisionTerms:
    """The part that may change, as the run starts with it."""
    return RevisionTerms(
        number=0,
        from_version=0,
        bootstrap=new.bootstrap,
        rpc_urls=new.rpc,
        thresholds=default_thresholds(dtype),
        window=WindowTerms(
            async_level=new.preset.async_level, units_per_version=new.preset.units_per_version
        ),
        head_poll_s=new.preset.head_poll_s,
        min_publish_interval_s=new.preset.min_publish_interval_s,
    )


def audit_terms(choice: AuditChoice, signer: LocalSigner, terms: RunTerms) -> AuditTerms:
    """The choice, with the anchor that commits to the seeds of all versions."""
    anchor = SeedChain(signer, run_id(terms), 0).anchor
    return AuditTerms(
        anchor=anchor,
        unit_value=choice.unit_value,
        probation_units=choice.probation_units,
        min_share=choice.min_share,
        safety=choice.safety,
    )


async def create_run(new: NewRun, tell: Tell) -> RunConfig:
    """Deploy what is not deployed, open the run on the ledger, and write run.toml.

    Raises:
        UsageError: the run exists, or no stake token is named.
        ConfigError: the checkpoint folder does not hold what a run needs.
        LedgerError, UnreachableError: the chain refused, or does not answer.
    """
    from intellect_protocol.ledger.client import Ledger
    from intellect_protocol.ledger.deployment import TOKEN_UNIT
    from intellect_protocol.ledger.deployment import Deployment as Deployed
    from intellect_protocol.ledger.devkeys import development_signer

    run_file, deployment_file = new.out / "run.toml", new.out / "deployment.json"
    if run_file.exists():
        raise UsageError(f"{run_file} exists; nothing was changed")
    dtype = model_terms(new.checkpoint, new.chat)[0].dtype
    new.out.mkdir(parents=True, exist_ok=True)
    state_dir = new.out / "init-transactions"
    if deployment_file.exists():
        deployment = Deployed.load(deployment_file)
        tell(f"using the contracts of {deployment_file}")
    else:
        deployment = await _deploy(new, state_dir)
        deployment.save(deployment_file)
        tell(f"deployed the contracts on chain {deployment.chain_id}")
    terms, revision = run_terms(new, deployment), first_revision(new, dtype)
    if new.audit is not None:
        revision = msgspec.structs.replace(revision, audit=audit_terms(new.audit, new.signer, terms))
    config = RunConfig(terms, revision).signed(new.signer)
    config.check()
    ledger = Ledger(new.rpc, deployment, state_dir)
    try:
        await ledger.check()
        coordinator = new.signer.address
        if new.development:
            deployer = development_signer(0)
            await ledger.transfer_eth(deployer, coordinator, _COORDINATOR_WEI, intent="init: eth")
            amount = _COORDINATOR_TOKENS * TOKEN_UNIT
            await ledger.mint_token(deployer, coordinator, amount, intent="init: tokens")
        if await ledger.run(config.run_id) is None:
            await ledger.open_run(new.signer, config.run_id, new.publisher)
    finally:
        ledger.close()
    _write_whole(run_file, config.to_toml())
    tell(f"run {config.run_id.hex()} is in {run_file}")
    return config


async def _deploy(new: NewRun, state_dir: Path) -> Deployment:
    from intellect_protocol.ledger.chain import Chain
    from intellect_protocol.ledger.deployment import LedgerParameters, deploy
    from intellect_protocol.ledger.devkeys import development_signer
    from intellect_protocol.ledger.rpc import FailoverProvider
    from intellect_protocol.ledger.sending import TransactionQueue

    roles: dict[str, Any] = {"validators": _distinct(new.validators), "coordinator": new.signer.address}
    delays = {"window_s": new.window_s, "voting_s": new.voting_s}
    chosen: dict[str, Any] = {name: value for name, value in delays.items() if value is not None}
    if new.development:
        deployer = development_signer(0)
        parameters = LedgerParameters.development(**roles, **chosen)
    elif new.token is None:
        raise UsageError("name the stake token: --token ADDRESS (or --development for a chain of no value)")
    else:
        deployer = new.signer
        parameters = LedgerParameters(**roles, **chosen, token=new.token)
    provider = FailoverProvider(new.rpc)
    queue = TransactionQueue(Chain(provider), state_dir)
    try:
        return await deploy(queue, deployer, parameters)
    finally:
        queue.close()
        provider.close()


def _distinct(validators: Sequence[str]) -> tuple[str, ...]:
    from intellect_protocol.keys import address_bytes, checksum_address

    found = tuple(dict.fromkeys(checksum_address(address_bytes(each)) for each in validators))
    if len(found) < 2:
        raise UsageError("a validator set has at least two members: --validator ADDRESS, repeated")
    return found


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
