"""The engine's client with real children: killed, stopped, starved, cancelled, orphaned."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import trio
from engine_models import assert_same, make_engine, make_model, make_requests, rows_of, seed
from engine_models import generate as generate_here
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from intellect_protocol.engines import pipe
from intellect_protocol.engines.base import GenerateRequest, Sampling
from intellect_protocol.engines.supervisor import EngineClient, EngineOptions, open_engine
from intellect_protocol.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    NumericError,
    PreflightError,
    UsageError,
    WireError,
)

OPTIONS = EngineOptions(device="cpu", dtype="float32", max_rows=64)
PROBE = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("newer"), seed=9)


def long_work() -> list[GenerateRequest]:
    """Enough to be interrupted in the middle; completions arrive at different times."""
    return make_requests(prompts=8, samples=4, max_tokens=150)


def once(engine: EngineClient, act: Callable[[int], None]) -> Callable[[int], None]:
    """A progress callback that does something to the child, the first time only."""
    done: list[int] = []

    def callback(tokens: int) -> None:
        assert tokens > 0
        if not done:
            done.append(tokens)
            act(pid_of(engine))

    return callback


def pid_of(engine: EngineClient) -> int:
    pid = engine.health().pid
    assert pid is not None
    return pid


async def test_a_child_generates_scores_and_probes_as_an_engine_in_this_process(model: Path) -> None:
    requests, here = make_requests(), make_engine(model)
    seen: list[int] = []
    async with open_engine(OPTIONS) as engine:
        info = await engine.load(model)
        assert (info.engine, info.dtype, info.device) == ("torch", "float32", "cpu")
        completions = await engine.generate(requests, Sampling(), progress=seen.append)
        assert_same(completions, generate_here(here, requests))
        assert seen
        assert seen == sorted(set(seen))
        scores = await engine.score(rows_of(requests, completions), Sampling())
        assert max(max(row.distances) for row in scores) == 0
        assert [len(row.logprobs) for row in scores] == [len(c.tokens) for own in completions for c in own]
        assert await engine.probe(PROBE) == here.probe(PROBE)
        pid = pid_of(engine)
    assert not psutil.pid_exists(pid)


async def test_a_killed_child_is_replaced_by_one_with_half_the_batch_and_nothing_changes(model: Path) -> None:
    requests = long_work()
    async with open_engine(OPTIONS) as engine:
        await engine.load(model)
        completions = await engine.generate(
            requests, Sampling(), progress=once(engine, lambda pid: os.kill(pid, signal.SIGKILL))
        )
        health = engine.health()
    assert_same(completions, generate_here(make_engine(model), requests))
    assert health.restarts == 1
    assert health.max_rows == 32
    assert health.last_failure.startswith("killed, probably out of memory: had ")


async def test_a_stopped_child_counts_as_stalled_and_is_replaced(model: Path) -> None:
    requests = long_work()
    async with open_engine(EngineOptions(device="cpu", dtype="float32", stall_s=3)) as engine:
        await engine.load(model)
        stopped: list[int] = []

        def stop(pid: int) -> None:
            stopped.append(pid)
            os.kill(pid, signal.SIGSTOP)

        completions = await engine.generate(requests, Sampling(), progress=once(engine, stop))
        assert [len(own) for own in completions] == [4] * 8
        assert engine.health().last_failure == "stalled: no tokens for 3 s"
        assert pid_of(engine) not in stopped
    assert not any(psutil.pid_exists(pid) for pid in stopped)


async def test_work_is_handed_back_after_failures_of_one_kind_and_the_engine_goes_on(model: Path) -> None:
    async with open_engine(OPTIONS) as engine:
        await engine.load(model)
        with pytest.raises(EngineError, match="gave up after 3 failures; the last: killed") as caught:
            await engine.generate(
                make_requests(prompts=2, samples=2, max_tokens=500 - 16),
                Sampling(),
                progress=lambda tokens: os.kill(pid_of(engine), signal.SIGKILL),
            )
        assert caught.value.reason == "killed"
        assert engine.health().pid is None
        requests = make_requests(prompts=1)
        assert_same(await engine.generate(requests, Sampling()), generate_here(make_engine(model), requests))


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
async def test_an_engine_out_of_memory_comes_back_with_a_smaller_batch(model: Path) -> None:
    # Long prompts: what does not fit is the cache of all rows, taken in a few large pieces.
    requests = [
        GenerateRequest([p + 1] * 300, [seed(p, s) for s in range(128)], max_tokens=3) for p in range(2)
    ]
    async with open_engine(EngineOptions(device="cpu", dtype="float32", max_rows=256)) as engine:
        await engine.load(model)
        used = psutil.Process(pid_of(engine)).memory_info().data  # what RLIMIT_DATA counts
        resource.prlimit(pid_of(engine), resource.RLIMIT_DATA, (used + (80 << 20),) * 2)
        completions = await engine.generate(requests, Sampling())
        assert [len(own) for own in completions] == [128] * 2
        health = engine.health()
    assert health.restarts == 1
    assert health.max_rows == 128
    assert "memory" in health.last_failure


async def test_update_changes_the_policy_and_a_restart_brings_the_newest_back(
    model: Path, newer: Path
) -> None:
    async with open_engine(OPTIONS) as engine:
        await engine.load(model)
        old, pid = await engine.probe(PROBE), pid_of(engine)
        await engine.update(newer)
        new = await engine.probe(PROBE)
        assert pid_of(engine) == pid
        assert old == make_engine(model).probe(PROBE)
        assert new == make_engine(newer).probe(PROBE)
        os.kill(pid, signal.SIGKILL)
        assert await engine.probe(PROBE) == new
        assert pid_of(engine) != pid


async def test_a_checkpoint_that_does_not_fit_leaves_the_policy_and_the_child(
    model: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "llama", "llama")
    async with open_engine(OPTIONS) as engine:
        await engine.load(model)
        before, pid = await engine.probe(PROBE), pid_of(engine)
        for folder in (other, tmp_path / "nowhere"):
            with pytest.raises(ConfigError):
                await engine.update(folder)
        with pytest.raises(UsageError):
            await engine.generate([GenerateRequest([10_000], [b"0" * 32], 4)], Sampling())
        assert await engine.probe(PROBE) == before
        assert pid_of(engine) == pid


async def test_numbers_that_are_not_finite_are_an_error_and_not_retried(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    async with open_engine(OPTIONS) as engine:
        await engine.load(tmp_path)
        with pytest.raises(NumericError, match="NaN"):
            await engine.generate(make_requests(), Sampling())
        assert engine.health().restarts == 0


async def test_cancelling_keeps_the_child_and_a_deadline_is_an_error(model: Path) -> None:
    async with open_engine(OPTIONS) as engine:
        await engine.load(model)
        pid = pid_of(engine)
        with trio.CancelScope() as scope:
            await engine.generate(long_work(), Sampling(), progress=lambda tokens: scope.cancel())
        assert scope.cancelled_caught
        with pytest.raises(DeadlineError):
            await engine.generate(long_work(), Sampling(), deadline_s=0.05)
        requests = make_requests(prompts=1)
        assert_same(await engine.generate(requests, Sampling()), generate_here(make_engine(model), requests))
        assert pid_of(engine) == pid


async def test_one_engine_serves_callers_one_after_the_other(model: Path) -> None:
    requests, results = make_requests(), {}
    async with open_engine(OPTIONS) as engine:
        await engine.load(model)

        async def caller(number: int) -> None:
            results[number] = await engine.generate([requests[number]], Sampling())

        async with trio.open_nursery() as nursery:
            for number in range(len(requests)):
                nursery.start_soon(caller, number)
    expected = generate_here(make_engine(model), requests)
    assert_same([results[number][0] for number in range(len(requests))], expected)


async def test_bad_options_fail_at_start() -> None:
    import torch

    for options in (
        EngineOptions(engine="llama.cpp"),
        EngineOptions(device="tpu"),
        EngineOptions(max_rows=0),
    ):
        with pytest.raises(ConfigError):
            async with open_engine(options):
                pass
    if not torch.cuda.is_available():
        with pytest.raises(PreflightError, match="CUDA"):
            async with open_engine(EngineOptions(device="cuda")):
                pass


async def test_an_engine_without_a_policy_says_so() -> None:
    async with open_engine(OPTIONS) as engine:
        with pytest.raises(UsageError, match="no policy"):
            await engine.probe(PROBE)
        with pytest.raises(UsageError, match="no policy"):
            _ = engine.info


_ORPHAN = """
import os, signal, sys, trio
from intellect_protocol.engines.supervisor import EngineOptions, open_engine
async def main():
    async with open_engine(EngineOptions(device="cpu")) as engine:
        pid = engine.health().pid
        if sys.argv[1] == "stopped":
            os.kill(pid, signal.SIGSTOP)
        print(pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
trio.run(main)
"""


@pytest.mark.parametrize("child", ["running", "stopped"])
def test_the_child_of_a_killed_parent_is_gone(child: str) -> None:
    if child == "stopped" and sys.platform != "linux":
        pytest.skip("only Linux ends a stopped child with its parent")
    parent = subprocess.run(
        [sys.executable, "-c", _ORPHAN, child], stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert parent.returncode == -signal.SIGKILL
    try:
        psutil.Process(int(parent.stdout)).wait(timeout=20)
    except psutil.NoSuchProcess:
        return


def test_parents_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import intellect_protocol.engines.supervisor, intellect_protocol.environments.prompts;"
        "from intellect_protocol.environments import registry;"
        "registry.make('arithmetic'), registry.make('spell_backward');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'reasoning_gym')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@given(st.binary(max_size=200))
def test_frames_of_any_bytes_decode_or_are_refused(payload: bytes) -> None:
    for decode in (pipe.unpack_to_child, pipe.unpack_from_child):
        with contextlib.suppress(WireError):
            decode(payload)
    if len(payload) == 4 and int.from_bytes(payload, "big") > pipe.MAX_FRAME_BYTES:
        with pytest.raises(WireError):
            pipe.length_of(payload)


def test_a_frame_over_the_limit_is_neither_sent_nor_read() -> None:
    with pytest.raises(WireError):
        pipe.pack(pipe.Probe([2**31] * (pipe.MAX_FRAME_BYTES // 5)))
    with pytest.raises(WireError):
        pipe.length_of((pipe.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
