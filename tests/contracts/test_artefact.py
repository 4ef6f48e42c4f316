"""The compiled contracts that ship are those of the sources, byte for byte."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARTEFACT = ROOT / "protocol/intellect_protocol/ledger/contracts.json"


def test_compiling_the_sources_gives_the_artefact_that_ships(tmp_path: Path) -> None:
    if not (ROOT / "contracts/node_modules/solc").is_dir():
        pytest.skip("npm packages of contracts/ are not installed: `make test` does it")
    output = tmp_path / "contracts.json"
    result = subprocess.run(
        ["node", "compile.mjs", output], cwd=ROOT / "contracts", capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert output.read_bytes() == ARTEFACT.read_bytes()


def test_the_artefact_holds_the_sources_it_was_made_of() -> None:
    shipped = json.loads(ARTEFACT.read_text())["sources"]
    sources = {f"src/{path.name}": path.read_text() for path in (ROOT / "contracts/src").glob("*.sol")}
    assert shipped == sources


def test_no_contract_exceeds_the_size_limit_of_the_chain() -> None:
    for name, content in json.loads(ARTEFACT.read_text())["contracts"].items():
        # EIP-170 limits deployed code to 24,576 bytes; creation code is longer than that by the constructor.
        assert len(content["bytecode"]) // 2 < 24_576, name
