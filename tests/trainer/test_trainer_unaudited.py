"""Units that were not drawn for an audit: what their node says about log-probs has no effect."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import trio
from micro_run import CONFIG, PUBLISHER, make_batch, make_model, make_run, manifests, put_batch
from safetensors.torch import load_file

from intellect_protocol.checkpoint import checkpoint_hash
from intellect_protocol.errors import RolloutFileError
from intellect_protocol.messages import TrainingState
from intellect_trainer.data import BatchSource, Group
from intellect_trainer.journal import Journal, UnitKey
from intellect_trainer.layout import checkpoint_folder
from intellect_trainer.loop import train
from intellect_trainer.packing import TrainRow
from intellect_trainer.past_policies import PastPolicies
from intellect_trainer.policy import load_policy
from intellect_trainer.session import RunOptions

DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "v0"
    make_model(folder)
    return folder


async def weights_after(
    model: Path, root: Path, steps: int, *, audited: bool, lie: float, feed_only: int | None = None
) -> dict[str, torch.Tensor]:
    """Train on units whose node lies about its log-probs, and return what was published at the end.

    `feed_only`: all units are of this version, so that later steps train on stale work.
    """
    options = RunOptions(
        run=make_run(model),
        config=msgspec.structs.replace(CONFIG, keep_checkpoints=4),
        data_dir=root / "trainer",
        batches=root / "batches",
        signer=PUBLISHER,
        checkpoint=model,
        steps=steps,
    )
    checkpoints = options.data_dir / "checkpoints"

    def feed() -> None:
        for version, signed in manifests(checkpoints).items():
            if feed_only in (None, version) and not (options.batches / f"v{version:08d}").exists():
                for index in range(1 if feed_only is None else steps):
                    batch = make_batch(
                        options.run, version, checkpoint_hash(signed.manifest), index=index,
                        audited=audited, lie=lie,
                    )  # fmt: skip
                    put_batch(options.batches, batch)

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:

            async def keep_feeding() -> None:
                while True:
                    feed()
                    await trio.sleep(0.005)

            nursery.start_soon(keep_feeding)
            await train(options)
            nursery.cancel_scope.cancel()
    return load_file(checkpoint_folder(checkpoints, steps) / "model.safetensors")


def differ(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("lie", [-3.0, 2.0, 9.0])
async def test_a_lie_about_log_probs_changes_no_gradient_unless_an_audit_would_have_replaced_it(
    model: Path, tmp_path: Path, lie: float
) -> None:
    honest = await weights_after(model, tmp_path / "honest", 2, audited=False, lie=0.0)
    liar = await weights_after(model, tmp_path / "liar", 2, audited=False, lie=lie)
    assert not differ(honest, liar)
    start = load_file(model / "model.safetensors")
    assert differ(start, honest)
    if lie < 4:  # a log-prob above 0 would be refused in an audited file
        believed = await weights_after(model, tmp_path / "believed", 2, audited=True, lie=lie)
        truth = await weights_after(model, tmp_path / "truth", 2, audited=True, lie=0.0)
        assert differ(believed, truth)


async def test_stale_units_get_the_log_probs_of_their_own_version(model: Path, tmp_path: Path) -> None:
    honest = await weights_after(model, tmp_path / "a", 3, audited=False, lie=0.0, feed_only=0)
    liar = await weights_after(model, tmp_path / "b", 3, audited=False, lie=-2.0, feed_only=0)
    assert not differ(honest, liar)


def past(model: Path, folder: Path, versions: dict[int, float]) -> PastPolicies:
    """Checkpoints of some versions: the model with all weights scaled."""
    from safetensors.torch import save_file

    for version, scale in versions.items():
        target = checkpoint_folder(folder, version)
        target.mkdir(parents=True)
        for path in model.iterdir():
            if path.suffix != ".safetensors":
                (target / path.name).write_bytes(path.read_bytes())
        weights = {name: tensor * scale for name, tensor in load_file(model / "model.safetensors").items()}
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return PastPolicies(folder, make_run(model), CONFIG)


def groups_of(model: Path, *versions: int, audited: bool = False) -> list[Group]:
    run = make_run(model)
    return [
        Group(
            UnitKey(version, b"n" * 20, number),
            0,
            b"f" * 32,
            1,
            make_batch(run, version, b"c" * 32, index=number).rows[:4],
            audited,
        )
        for number, version in enumerate(versions)
    ]


def rows_of(group: Group) -> list[TrainRow]:
    return [
        TrainRow(row.prompt_tokens, row.completion_tokens, row.logprobs, float(number))
        for number, row in enumerate(group.rows)
    ]


def test_computed_log_probs_are_those_of_each_row_alone_under_its_own_version(
    model: Path, tmp_path: Path
) -> None:
    policies = past(model, tmp_path, {3: 1.0, 4: 1.5})
    groups = groups_of(model, 4, 3, 4)
    found = policies.checked_rows(groups, rows_of)
    for group, rows in zip(groups, found, strict=True):
        policy = load_policy(
            checkpoint_folder(tmp_path, group.unit.version), dtype="float32", attention=CONFIG.attention
        )
        for claimed, row in zip(rows_of(group), rows, strict=True):
            ids = torch.tensor([[*row.prompt_tokens, *row.completion_tokens]])
            with torch.no_grad():
                log_p = torch.log_softmax(policy(input_ids=ids).logits[0], dim=-1)
            first = len(row.prompt_tokens)
            expected = [float(log_p[at - 1, ids[0, at]]) for at in range(first, ids.shape[1])]
            np.testing.assert_allclose(row.old_logprobs, expected, atol=1e-5)
            assert row.old_logprobs.dtype == np.float32
            assert (row.completion_tokens, row.advantage) == (claimed.completion_tokens, claimed.advantage)


def test_audited_groups_keep_the_validators_log_probs(model: Path, tmp_path: Path) -> None:
    policies = past(model, tmp_path, {3: 1.0})
    groups = [*groups_of(model, 3, audited=True), *groups_of(model, 3)]
    kept, computed = policies.checked_rows(groups, rows_of)
    claimed = rows_of(groups[0])
    assert all(row.old_logprobs is mine.old_logprobs for row, mine in zip(kept, claimed, strict=True))
    assert not np.array_equal(computed[0].old_logprobs, rows_of(groups[1])[0].old_logprobs)


def test_weights_are_at_hand_while_the_folder_is_kept(model: Path, tmp_path: Path) -> None:
    policies = past(model, tmp_path, {0: 1.0, 5: 1.0, 6: 1.0})
    assert CONFIG.keep_checkpoints == 2
    assert policies.has_weights(6, 6)
    assert policies.has_weights(5, 6)
    assert policies.has_weights(0, 6)
    assert not policies.has_weights(5, 7)  # about to be removed
    assert not policies.has_weights(4, 5)  # not there
    with pytest.raises(RolloutFileError, match="version 4"):
        policies.checked_rows(groups_of(model, 4), rows_of)


def test_an_unaudited_group_whose_weights_are_gone_expires_and_an_audited_one_does_not(
    model: Path, tmp_path: Path
) -> None:
    run = make_run(model)
    journal = Journal(tmp_path / "journal.sqlite")
    try:
        for version in (3, 4):
            journal.record_checkpoint(version, bytes([version]) * 32)
        for index, audited in ((0, True), (1, False)):
            for version in (3, 4):
                batch = make_batch(run, version, bytes([version]) * 32, index=index, audited=audited)
                put_batch(tmp_path / "batches", batch)
        source = BatchSource(
            tmp_path / "batches", journal, run, has_weights=lambda version, head: version == 4
        )
        source.poll()
        data = source.choose(head=4, count=100)
        trained = {(group.unit.version, group.audited) for group in data.groups}
        assert trained == {(3, True), (4, True), (4, False)}
        expired = {(entry.unit.version, entry.unit.unit_index) for entry in data.plan} - {
            (group.unit.version, group.unit.unit_index) for group in data.groups
        }
        assert expired == {(3, 1)}
        assert {entry.outcome for entry in data.plan} == {TrainingState.TRAINED, TrainingState.EXPIRED}
        again = source.repeat(head=4)
        assert again is not None
        assert [group.audited for group in again.groups] == [group.audited for group in data.groups]
    finally:
        journal.close()


def test_an_impossible_claim_does_not_spoil_an_unaudited_file(model: Path, tmp_path: Path) -> None:
    run = make_run(model)
    journal = Journal(tmp_path / "journal.sqlite")
    try:
        journal.record_checkpoint(3, b"c" * 32)
        for index, audited in ((0, False), (1, True)):
            put_batch(
                tmp_path / "batches", make_batch(run, 3, b"c" * 32, index=index, audited=audited, lie=50.0)
            )
        source = BatchSource(tmp_path / "batches", journal, run, has_weights=lambda version, head: True)
        source.poll()
        assert {group.unit.unit_index for group in source.trainable(3)} == {0}
        assert source.files_set_aside == 1
    finally:
        journal.close()
