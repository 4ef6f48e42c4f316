"""The web page's process: what it shows, and that it can change nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import trio
import urllib3
from coordinator_site import FRAUD, NODE, Site, accept, plain_file
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from intellect_coordinator.status import write_status
from intellect_coordinator.web.server import prometheus, reading_engine


async def some_work(site: Site) -> None:
    for index in range(2):
        await site.submit(plain_file(site, index), index)
    await accept(site)
    await site.judge("rejected", FRAUD)


@pytest.fixture
def url(site: Site) -> Iterator[str]:
    """A coordinator with an accepted and a refused unit, its page in a child process."""
    trio.run(some_work, site)
    write_status(site.folder, {"head": 7})
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "intellect_coordinator",
            "web",
            "--data-dir",
            str(site.folder),
            "--port",
            "0",
            "--until-stdin-closes",
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stdin is not None
    line = process.stderr.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+", line)
    assert found, line
    yield found[0]
    process.stdin.close()
    assert process.wait(timeout=60) == 0  # it does not outlive its parent
    process.stderr.close()


def get(url: str, method: str = "GET") -> tuple[int, bytes, urllib3.HTTPHeaderDict]:
    with urllib3.PoolManager(retries=False) as pool:
        response = pool.request(method, url)
        return response.status, response.data, response.headers


def test_the_page_shows_what_the_database_says_and_takes_no_orders(url: str) -> None:
    status, page, headers = get(url + "/")
    assert status == 200
    assert b"<!doctype html>" in page
    # No external assets: the policy of the page forbids them, and it has none.
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(rb"""(src|href)\s*=\s*["']?https?:""", page)

    status, body, _ = get(url + "/api/status")
    content = json.loads(body)
    assert (content["accepted"], content["rejected"], content["head"]) == (1, 1, 7)
    assert content["reasons"] == {FRAUD.code: 1}
    assert content["fraud_verdicts"][0]["node"] == f"0x{NODE.address_bytes.hex()}"

    listed = json.loads(get(url + "/api/submissions?state=rejected")[1])
    assert [entry["index"] for entry in listed] == [1]
    shown = json.loads(get(f"{url}/api/submissions/{listed[0]['id']}")[1])
    assert shown["findings"][0]["measured"] == FRAUD.measured
    assert json.loads(get(url + "/api/submissions?node=0x" + "00" * 20)[1]) == []
    assert b'intellect_submissions{state="accepted"} 1' in get(url + "/metrics")[1]

    for path, expected in [
        ("/api/submissions/999", 404),
        ("/api/submissions/x", 400),
        ("/api/submissions?node=zz", 400),
        ("/api/submissions?limit=-1", 400),
        ("/../coordinator.sqlite", 404),
        ("/nothing", 404),
    ]:
        assert get(url + path)[0] == expected, path
    for method in ("POST", "PUT", "DELETE"):
        assert get(url + "/api/status", method)[0] == 405


def test_the_pages_database_connection_cannot_write(site: Site) -> None:
    engine = reading_engine(f"sqlite:///{site.folder / 'coordinator.sqlite'}")
    try:
        with engine.connect() as connection:
            assert connection.execute(text("SELECT COUNT(*) FROM submissions")).scalar() == 0
            with pytest.raises(SQLAlchemyError, match="readonly"):
                connection.execute(text("INSERT INTO events (at_ms, text) VALUES (1, 'x')"))
    finally:
        engine.dispose()


def test_labels_of_metrics_are_escaped() -> None:
    content = {
        "accepted": 0,
        "rejected": 1,
        "inconclusive": 0,
        "pending": 0,
        "reasons": {'a"b\\c\nd': 1},
        "cases": [{"status": "upheld"}, {"status": "upheld"}],
        "jobs": {},
        "committed_versions": 3,
    }
    lines = prometheus(content).splitlines()
    assert 'intellect_refusals{code="a\\"b\\\\c\\nd"} 1' in lines
    assert 'intellect_cases{state="upheld"} 2' in lines
