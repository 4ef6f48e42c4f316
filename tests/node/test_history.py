"""The signed history: one answer per unit, whatever happens to the process or the disk."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_node.entries import REFUSED, SIGNED
from intellect_node.history import History
from intellect_protocol.errors import HistoryError
from intellect_protocol.keys import LocalSigner, recover_address, work_digest
from intellect_protocol.messages import (
    FindingNote,
    GetVerdictsResult,
    Receipt,
    SubmissionState,
    TrainingState,
    WorkStatus,
)
from intellect_protocol.wire import sha256

RUN = bytes(range(32))
CHECKPOINT = b"\xcc" * 32
NODE = LocalSigner(b"\x07" * 32)


def open_history(folder: Path, node: LocalSigner = NODE, run: bytes = RUN) -> History:
    return History(folder, run, node.address)


def sign(history: History, version: int, index: int, content: bytes):
    return history.sign_work(NODE, RUN, version, CHECKPOINT, index, content, 1_000)


def status(entry, state: SubmissionState, **changes) -> WorkStatus:
    fields = {
        "version": entry.version,
        "index": entry.index,
        "file_hash": entry.file_hash,
        "state": state,
        "training": TrainingState.NONE,
        "times_ms": {"received": 5, str(state): 6},
        "findings": [],
    }
    return WorkStatus(**{**fields, **changes})


def test_a_signed_unit_is_on_disk_with_a_signature_over_exactly_its_file(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    entry = sign(history, 3, 0, b"rollouts")
    history.close()
    again = open_history(tmp_path).entry(3, 0)
    assert again == entry
    digest = work_digest(RUN, 3, CHECKPOINT, 0, sha256(b"rollouts"), len(b"rollouts"))
    assert recover_address(digest, again.signature) == NODE.address
    assert open_history(tmp_path).content(again) == b"rollouts"


def test_a_second_answer_for_a_unit_is_impossible_and_the_first_one_stays(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    first = sign(history, 3, 0, b"one")
    with pytest.raises(HistoryError, match="equivocation"):
        sign(history, 3, 0, b"two")
    with pytest.raises(HistoryError):
        history.sign_abandon(3, 0, 0)
    assert history.entry(3, 0) == first
    assert sign(history, 3, 0, b"one") == first  # the same answer again is no second one
    history.sign_abandon(3, 1, 0)
    with pytest.raises(HistoryError):
        sign(history, 3, 1, b"work after all")


def test_the_database_itself_refuses_to_change_or_forget_what_was_signed(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    sign(history, 1, 0, b"one")
    history.close()
    with sqlite3.connect(tmp_path / "history.db") as db:
        for statement in ("UPDATE signed SET file_hash = x'00'", "DELETE FROM signed"):
            with pytest.raises(sqlite3.IntegrityError, match="signed history"):
                db.execute(statement)
        with pytest.raises(sqlite3.IntegrityError):
            db.execute("INSERT INTO signed SELECT * FROM signed")
    db.close()


_KILLED_CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_history import CHECKPOINT, NODE, RUN, open_history
history = open_history(Path(sys.argv[2]))
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
moment = sys.argv[3]
if moment == "after-commit":
    history.sign_work(NODE, RUN, 4, CHECKPOINT, 0, b"first try", 1)
    die()
history.sign_work(NODE, RUN, 4, CHECKPOINT, 0, b"first try", 1, before_commit=die)
"""


def run_and_kill(folder: Path, moment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED_CHILD, str(Path(__file__).parent), str(folder), moment],
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_killed_before_the_commit_nothing_was_signed_and_the_unit_is_made_again(tmp_path: Path) -> None:
    open_history(tmp_path).close()
    run_and_kill(tmp_path, "before-commit")
    assert list((tmp_path / "outbox").glob("*.parquet"))  # the orphan
    history = open_history(tmp_path)
    history.sweep()
    assert history.next_index(4) == 0
    assert not list((tmp_path / "outbox").iterdir())
    entry = sign(history, 4, 0, b"second try, other bytes")
    assert history.due(0)[0] == [entry]


def test_killed_after_the_commit_the_signed_unit_is_still_to_be_sent(tmp_path: Path) -> None:
    run_and_kill(tmp_path, "after-commit")
    history = open_history(tmp_path)
    history.sweep()
    ready, _ = history.due(0)
    assert [history.content(entry) for entry in ready] == [b"first try"]
    with pytest.raises(HistoryError):
        sign(history, 4, 0, b"other bytes")


def test_the_history_of_another_key_or_run_is_not_taken_over(tmp_path: Path) -> None:
    open_history(tmp_path).close()
    with pytest.raises(HistoryError, match="another node key"):
        open_history(tmp_path, node=LocalSigner(b"\x08" * 32))
    with pytest.raises(HistoryError, match="another node key or run"):
        open_history(tmp_path, run=bytes(32))


@pytest.mark.parametrize("garbage", [b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_history_is_a_clear_error_and_never_a_fresh_start(tmp_path: Path, garbage: bytes) -> None:
    from intellect_protocol.errors import IntellectError

    (tmp_path / "history.db").write_bytes(garbage)
    with pytest.raises(IntellectError, match=r"history\.db"):
        open_history(tmp_path)
    assert (tmp_path / "history.db").read_bytes()[: len(garbage)] == garbage


def test_files_and_database_are_for_their_owner_only(tmp_path: Path) -> None:
    open_history(tmp_path)
    assert os.stat(tmp_path / "history.db").st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "outbox").st_mode & 0o777 == 0o700


def test_units_of_a_version_are_due_in_order_and_wait_behind_one_that_must_wait(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    second, first = sign(history, 2, 1, b"b"), sign(history, 2, 0, b"a")
    other = sign(history, 3, 0, b"c")
    assert history.due(0) == ([first, second, other], None)
    history.mark_failed(first, "no answer", 500)
    ready, next_ms = history.due(100)
    assert [(e.version, e.index) for e in ready] == [(3, 0)]
    assert next_ms == 500
    assert len(history.due(500)[0]) == 3
    history.mark_refused(first, "stale_version", "too old")
    assert [(e.version, e.index) for e in history.due(600)[0]] == [(2, 1), (3, 0)]


def test_a_changed_or_lost_file_is_noticed_before_it_is_sent(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    entry = sign(history, 2, 0, b"content")
    history.path_of(entry).write_bytes(b"Content")
    with pytest.raises(HistoryError, match="not the file"):
        history.content(entry)
    history.path_of(entry).unlink()
    with pytest.raises(HistoryError):
        history.content(entry)


def test_verdicts_and_cursor_are_taken_over_together_and_strangers_ignored(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    entry = sign(history, 2, 0, b"content")
    history.mark_received(entry, Receipt(RUN, 2, 0, NODE.address_bytes, entry.file_hash, 7, b""), 8)
    finding = FindingNote("sampling", "far_tokens", "fraud", 3, 0.4, 0.01, "tokens are not the draw")
    rejected = status(entry, SubmissionState.REJECTED, findings=[finding], case_id=4)
    stranger = status(entry, SubmissionState.ACCEPTED, index=9)
    impostor = status(entry, SubmissionState.ACCEPTED, file_hash=bytes(32))
    changed = history.apply_verdicts(GetVerdictsResult([rejected, stranger, impostor], 17, False))
    assert [(e.state, e.code, e.status) for e in changed] == [
        (SubmissionState.REJECTED, "far_tokens", rejected)
    ]
    assert history.apply_verdicts(GetVerdictsResult([rejected], 18, False)) == []
    assert history.cursor == 18
    assert history.refusals() == {"far_tokens": 1}
    assert open_history(tmp_path).cursor == 18


def test_a_receipt_that_comes_after_the_verdict_does_not_undo_it(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    entry = sign(history, 2, 0, b"content")
    history.apply_verdicts(GetVerdictsResult([status(entry, SubmissionState.ACCEPTED)], 1, False))
    history.mark_received(entry, Receipt(RUN, 2, 0, NODE.address_bytes, entry.file_hash, 7, b""), 8)
    after = history.entry(2, 0)
    assert (after.state, after.received_at_ms) == (SubmissionState.ACCEPTED, 7)
    history.mark_refused(entry, "stale_version", "too old")
    assert history.entry(2, 0).state == SubmissionState.ACCEPTED


def test_only_files_of_old_accepted_units_are_pruned(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    kept, dropped, refused = (sign(history, v, 0, bytes([v])) for v in (9, 1, 2))
    for entry, state in (
        (kept, SubmissionState.ACCEPTED),
        (dropped, SubmissionState.ACCEPTED),
        (refused, SubmissionState.REJECTED),
    ):
        history.apply_verdicts(GetVerdictsResult([status(entry, state)], 1, False))
    history.prune(5)
    assert [history.path_of(e).exists() for e in (kept, dropped, refused)] == [True, False, True]
    assert history.last_credited_version() == 9
    with pytest.raises(HistoryError):  # forgotten files do not free their units
        sign(history, 1, 0, b"again")


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["sign", "abandon", "receive", "refuse", "fail", "judge", "reopen"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.binary(min_size=1, max_size=2),
    ),
    max_size=25,
)


@given(_ACTIONS)
@settings(max_examples=30, deadline=None)
def test_no_sequence_of_events_changes_what_was_signed_first(tmp_path_factory, actions) -> None:
    folder = tmp_path_factory.mktemp("history")
    history = open_history(folder)
    first: dict[tuple[int, int], bytes] = {}
    for action, version, index, content in actions:
        unit = (version, index)
        entry = history.entry(*unit)
        if action in ("sign", "abandon"):
            answer = sha256(content) if action == "sign" else b""
            try:
                if action == "sign":
                    sign(history, version, index, content)
                else:
                    history.sign_abandon(version, index, 0)
            except HistoryError:
                assert first[unit] != answer
            first.setdefault(unit, answer)
        elif action == "reopen":
            history.close()
            history = open_history(folder)
            history.sweep()
        elif entry is not None and action == "receive":
            history.mark_received(entry, None, 1)
        elif entry is not None and action == "refuse":
            history.mark_refused(entry, "stale_version", "")
        elif entry is not None and action == "fail":
            history.mark_failed(entry, "later", 1)
        elif entry is not None:
            history.apply_verdicts(GetVerdictsResult([status(entry, SubmissionState.ACCEPTED)], 1, False))
    assert {(e.version, e.index): e.file_hash for e in history.entries()} == first
    for version in range(3):
        indices = [i for v, i in first if v == version]
        assert history.next_index(version) == max(indices, default=-1) + 1
    assert set(history.counts()) <= {SIGNED, REFUSED, *SubmissionState}
    history.close()
