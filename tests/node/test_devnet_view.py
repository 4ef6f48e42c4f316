"""What the devnet shows of the roles' status files."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from intellect_node.devnet.layout import DevnetPlan, Layout, free_ports, load_plan, save_plan
from intellect_node.devnet.snapshot import Snapshot, take_snapshot
from intellect_node.devnet.summary import summarize
from intellect_node.devnet.up import UpOptions, make_plan
from intellect_node.devnet.view import EventLog, format_bytes, render, sparkline
from intellect_protocol.errors import ConfigError

HONEST, CHEAT = "0x" + "11" * 20, "0x" + "ab" * 20


def write(folder: Path, **status: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps(status))
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    node = {"state": "generating", "version": 3, "units_accepted": 5, "stake": 1000.0}
    honest = write(
        tmp_path / "n", node=HONEST, bytes_from_origin=10, bytes_from_peers=30, units_rejected=0, **node
    )
    cheat = write(tmp_path / "c", node=CHEAT.upper().replace("X", "x"), **node)
    validator = write(tmp_path / "v", bytes_from_origin=1, bytes_from_peers=2)
    coordinator = write(
        tmp_path / "coordinator",
        accepted=9,
        rejected=2,
        reasons={"sampling_distance": 2},
        fraud_verdicts=[{"node": CHEAT}, {"node": CHEAT}],
        cases=[{"node": CHEAT, "status": "upheld", "seized": 1000.0}, {"node": HONEST, "status": "open"}],
        events=[{"time_ms": 1000, "text": "something happened"}],
    )
    trainer = write(
        tmp_path / "trainer",
        version=12,
        step=12,
        reward_history=[0.1] * 6 + [0.5] * 6,
        heldout=[{"step": 0, "score": 0.2}, {"step": 12, "score": 0.6}],
        idle_share=0.25,
        versions_published=13,
        seconds_since_first_step=60.0,
    )
    return take_snapshot(
        "demo", {"a": (honest, None), "b": (cheat, "best-of-n")}, [validator], coordinator, trainer
    )


def test_the_summary_counts_what_the_roles_report(snapshot: Snapshot) -> None:
    summary = summarize(snapshot, frozenset({HONEST}), frozenset({CHEAT}), {"a": 1000.0}, {"a": 1000.0})
    assert summary["cheats_slashed"] == 1
    assert summary["honest_fraud_verdicts"] == 0
    assert (summary["bytes_from_origin"], summary["bytes_from_peers"]) == (11, 32)
    assert (summary["heldout_before"], summary["heldout_after"]) == (0.2, 0.6)
    assert (summary["reward_first"], summary["reward_last"]) == (0.1, 0.5)
    blamed = summarize(snapshot, frozenset({CHEAT}), frozenset(), {}, {})
    assert blamed["honest_fraud_verdicts"] == 2


def test_the_view_shows_nodes_stakes_and_events(snapshot: Snapshot) -> None:
    events = EventLog(None)
    events.tell("something happened")
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(snapshot, events))
    console.file.close()
    text = console.export_text()
    assert "policy version 12" in text
    assert "0.20 → 0.60" in text
    assert "something happened" in text
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│ ")}
    assert "1000" in rows["a"]
    assert "slashed" in rows["b (best-of-n)"]
    assert "1000" not in rows["b (best-of-n)"]


def test_missing_and_broken_status_files_show_as_starting(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "status.json").write_text("{")
    folders = {"a": (tmp_path / "none", None), "b": (tmp_path / "broken", None)}
    snapshot = take_snapshot("demo", folders, [], tmp_path / "x", tmp_path / "y")
    assert [node.state for node in snapshot.nodes] == ["starting", "starting"]


def test_sparklines_and_sizes() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([0.5] * 1000, width=40)) == 40
    assert [format_bytes(n) for n in (5, 1500, 2_000_000)] == ["5 B", "1.5 KB", "2.0 MB"]


def options(root: Path, **changes: Any) -> UpOptions:
    values: dict[str, Any] = {
        "data_dir": root, "nodes": None, "cheats": None, "model": None, "task": None, "steps": None,
        "minutes": None, "seed": None, "json_file": None, "tui": False, "set_default": False,
    }  # fmt: skip
    return UpOptions(**{**values, **changes})


def test_a_devnet_keeps_its_plan_and_refuses_another(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "net")
    plan = make_plan(options(layout.root, cheats=("wrong-model", "best-of-n")), layout)
    assert make_plan(options(layout.root), layout) == plan
    assert len(set(plan.ports.values())) == len(plan.ports)
    for change in ({"model": "smollm2"}, {"nodes": 5}, {"cheats": ()}):
        with pytest.raises(ConfigError, match="another --data-dir"):
            make_plan(options(layout.root, **change), layout)


def test_a_damaged_plan_is_a_configuration_error(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert load_plan(layout) is None
    save_plan(layout, DevnetPlan("tiny", "tiny", "sort_digits", 1, [], 0, {"chain": free_ports(1)[0]}))
    assert load_plan(layout) is not None
    layout.plan_file.write_text("{}")
    with pytest.raises(ConfigError):
        load_plan(layout)
