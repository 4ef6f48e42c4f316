"""The compiled contracts: `contracts.json`, written by `contracts/compile.mjs`."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import msgspec

CONTRACTS = ("ValidatorSet", "StakeLedger", "NodeRegistry", "WorkLedger", "SlashCourt")
TOKEN = "Token"


class Artefact(msgspec.Struct, frozen=True):
    """ABI (as JSON values) and creation bytecode of one contract."""

    abi: list[dict[str, Any]]
    bytecode: str


@cache
def artefacts() -> dict[str, Artefact]:
    """The compiled contracts by name, the development token under the name `Token`."""
    text = resources.files(__package__).joinpath("contracts.json").read_text()
    contracts: dict[str, Any] = json.loads(text)["contracts"]
    named = {name: Artefact(content["abi"], content["bytecode"]) for name, content in contracts.items()}
    named[TOKEN] = named.pop("DevToken")
    return named


def signature_of(entry: dict[str, Any]) -> str:
    """Canonical signature of an ABI function, error or event: `name(type,...)`."""

    def kind(parameter: dict[str, Any]) -> str:
        text: str = parameter["type"]
        if text.startswith("tuple"):
            return f"({','.join(map(kind, parameter['components']))}){text[5:]}"
        return text

    return f"{entry['name']}({','.join(map(kind, entry['inputs']))})"


@cache
def custom_errors() -> dict[bytes, dict[str, Any]]:
    """ABI entries of all custom errors by their 4-byte selector."""
    from eth_hash.auto import keccak

    return {
        bytes(keccak(signature_of(entry).encode())[:4]): entry
        for artefact in artefacts().values()
        for entry in artefact.abi
        if entry["type"] == "error"
    }
