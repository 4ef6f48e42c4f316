"""The run as a whole, in this process: what it waits for, what it records, when it evaluates and ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import trio
from micro_run import (
    CONFIG,
    PROMPTS,
    PUBLISHER,
    SAMPLES,
    feed,
    make_batch,
    make_model,
    make_run,
    manifests,
    put_batch,
)

from intellect_protocol.checkpoint import Manifest, checkpoint_hash
from intellect_protocol.wire import decode
from intellect_trainer.loop import train
from intellect_trainer.session import RunOptions

SAME = [1.0] * SAMPLES
DIFFER = [0.0, *SAME[1:]]
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "v0"
    make_model(folder)
    return folder


def _options(
    folder: Path, root: Path, *, steps: int | None, minutes: float | None = None, **config
) -> RunOptions:
    interval_s = config.pop("min_publish_interval_s", 0.0)
    return RunOptions(
        run=make_run(folder, min_publish_interval_s=interval_s),
        config=msgspec.structs.replace(CONFIG, **config),
        data_dir=root / "trainer",
        batches=root / "batches",
        signer=PUBLISHER,
        checkpoint=folder,
        steps=steps,
        minutes=minutes,
    )


async def _train(options: RunOptions, swarm: Callable[[], object]) -> None:
    """Run the trainer while `swarm` is called again and again."""
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:

            async def keep_feeding() -> None:
                while True:
                    swarm()
                    await trio.sleep(0.005)

            nursery.start_soon(keep_feeding)
            await train(options)
            nursery.cancel_scope.cancel()


def _lines(options: RunOptions, kind: str) -> list[dict]:
    lines = map(json.loads, (options.data_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def _feeder(options: RunOptions, rewards=None) -> Callable[[], None]:
    checkpoints = options.data_dir / "checkpoints"

    def swarm() -> None:
        for version, signed in manifests(checkpoints).items():
            if not (options.batches / f"v{version:08d}").exists():
                batch = make_batch(options.run, version, checkpoint_hash(signed.manifest), rewards=rewards)
                put_batch(options.batches, batch)

    return swarm


async def test_rewards_are_those_before_the_filter_and_units_are_marked(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=1, groups_per_step=PROMPTS - 1, updates_per_step=1)
    await _train(options, _feeder(options, [DIFFER, SAME, DIFFER]))
    (line,) = _lines(options, "step")
    rewards = [*DIFFER, *SAME, *DIFFER]
    assert line["reward"] == line["reward/sort_digits"] == pytest.approx(sum(rewards) / len(rewards))
    assert line["reward_trained"] == pytest.approx(sum(DIFFER) / SAMPLES)
    assert (line["groups_trained"], line["groups_filtered"], line["groups_lag_0"]) == (2, 1, 2)
    assert line["rows"] == 2 * SAMPLES
    (outcome,) = json.loads((options.batches / "outcomes" / "00000001.json").read_text()).values()
    assert outcome == "trained"


async def test_a_batch_that_never_fills_is_trained_on_after_the_timeout(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=2, fill_timeout_s=0.2, min_groups=1, updates_per_step=1)
    await _train(options, _feeder(options, [DIFFER, SAME, SAME]))
    assert [line["groups_trained"] for line in _lines(options, "step")] == [1, 1]


async def test_fewer_than_min_groups_are_not_trained_on(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=1, fill_timeout_s=0.05, min_groups=2)
    with trio.move_on_after(1.5):
        await _train(options, _feeder(options, [DIFFER, SAME, SAME]))
    assert sorted(manifests(options.data_dir / "checkpoints")) == [0]


async def test_held_out_tasks_are_scored_before_at_intervals_and_at_the_end(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=5, eval_every=2, eval_tasks=10)
    await _train(options, _feeder(options))
    assert [line["version"] for line in _lines(options, "heldout")] == [0, 2, 4, 5]
    status = json.loads((options.data_dir / "status.json").read_text())
    assert [entry["step"] for entry in status["heldout"]] == [0, 2, 4, 5]
    assert status["versions_published"] == 6
    assert 0 <= status["idle_share"] <= 1


async def test_the_time_limit_counts_from_the_first_step(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=None, minutes=1.0 / 60)
    await _train(options, _feeder(options))
    steps = _lines(options, "step")
    assert steps
    assert steps[-1]["seconds_since_first_step"] < DEADLINE_S
    assert json.loads((options.data_dir / "status.json").read_text())["finished"] is True


async def test_versions_are_published_no_faster_than_the_run_allows(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=4, min_publish_interval_s=0.5)
    await _train(options, _feeder(options))
    found = manifests(options.data_dir / "checkpoints")
    times = [msgspec.msgpack.decode(found[version].manifest)["created_at_ms"] for version in sorted(found)]
    assert all(later - earlier >= 490 for earlier, later in pairwise(times))


async def test_training_goes_on_with_older_rollouts_while_a_version_is_published(folder, tmp_path) -> None:
    # Nobody works on versions above 0: only rollouts of version 0 exist, enough for three steps.
    options = _options(folder, tmp_path, steps=3)

    def swarm() -> None:
        found = manifests(options.data_dir / "checkpoints")
        if 0 in found and not (options.batches / "v00000000").exists():
            for index in range(3):
                put_batch(
                    options.batches,
                    make_batch(options.run, 0, checkpoint_hash(found[0].manifest), index=index),
                )

    await _train(options, swarm)
    lags = [[key for key in line if key.startswith("groups_lag_")] for line in _lines(options, "step")]
    assert lags == [["groups_lag_0"], ["groups_lag_1"], ["groups_lag_2"]]


async def test_an_earlier_run_goes_on_to_a_later_version(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=2)
    await _train(options, lambda: feed(options.data_dir / "checkpoints", options.batches, options.run))
    options = _options(folder, tmp_path, steps=3)
    await _train(options, lambda: feed(options.data_dir / "checkpoints", options.batches, options.run))
    assert [line["version"] for line in _lines(options, "step")] == [1, 2, 3]


async def test_a_swarm_that_has_gone_quiet_gets_the_same_weights_as_a_new_version(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=2, republish_after_s=0.05, keep_checkpoints=4)
    await _train(options, lambda: None)
    found = manifests(options.data_dir / "checkpoints")
    assert max(found) == 2
    assert len({decode(signed.manifest, Manifest).state_hash for signed in found.values()}) == 1
    assert len({checkpoint_hash(signed.manifest) for signed in found.values()}) == len(found)
    assert not _lines(options, "step")
    assert [line["version"] for line in _lines(options, "republished")] == [1, 2]


async def test_training_goes_on_once_units_come_for_a_republished_version(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=3, republish_after_s=0.3)

    def newcomers() -> None:
        found = manifests(options.data_dir / "checkpoints")
        if 1 in found and not (options.batches / "v00000001").exists():
            put_batch(options.batches, make_batch(options.run, 1, checkpoint_hash(found[1].manifest)))

    await _train(options, newcomers)
    assert 1 in [line["version"] for line in _lines(options, "republished")]
    (step,) = _lines(options, "step")
    assert step["version"] > 1
    assert step["groups_trained"] == PROMPTS
