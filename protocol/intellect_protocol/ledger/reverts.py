"""One error for every way in which a chain says no.

web3 raises one of several exceptions for a revert and does not know our custom errors; eth-tester raises
its own, with the revert data as the text of a bytes literal. All become `LedgerError` with the custom
error's name.
"""

from __future__ import annotations

import ast
from typing import Any

from ..errors import LedgerError
from .artefacts import custom_errors

_ERROR_STRING = bytes.fromhex("08c379a0")  # Error(string), Solidity's own
_PANIC = bytes.fromhex("4e487b71")  # Panic(uint256)


def describe_revert(data: bytes) -> LedgerError:
    """The error behind the return data of a reverted call."""
    from eth_abi.abi import decode
    from eth_abi.exceptions import DecodingError

    selector, body = data[:4], data[4:]
    entry = custom_errors().get(selector)
    try:
        if entry is not None:
            values = decode([parameter["type"] for parameter in entry["inputs"]], body)
            texts = [value.hex() if isinstance(value, bytes) else str(value) for value in values]
            name: str = entry["name"]
            return LedgerError(f"the contract refused: {name}({', '.join(texts)})", name)
        if selector == _ERROR_STRING:
            (reason,) = decode(["string"], body)
            return LedgerError(f"the contract refused: {' '.join(reason.split())[:200]}")
        if selector == _PANIC:
            (code,) = decode(["uint256"], body)
            return LedgerError(f"the contract panicked with code {code:#x}", "Panic")
    except (DecodingError, OverflowError, ValueError):
        pass
    return LedgerError(f"the contract refused without a known reason (data 0x{data[:36].hex()})")


def revert_data(answer: Any) -> bytes | None:
    """The return data in the `error` member of a JSON-RPC answer, or None if it is not a revert.

    Nodes put it in `error.data`, some one level deeper.
    """
    if not isinstance(answer, dict):
        return None
    data = answer.get("data")
    if isinstance(data, dict):
        data = data.get("data", data.get("result"))
    if isinstance(data, str):
        text = data.removeprefix("Reverted ").removeprefix("0x")
        try:
            return bytes.fromhex(text)
        except ValueError:
            return None
    if answer.get("code") == 3 or "revert" in str(answer.get("message", "")).lower():
        return b""
    return None


def revert_of(error: BaseException) -> LedgerError | None:
    """The `LedgerError` for an exception of web3 or eth-tester that stands for a revert, else None."""
    data = getattr(error, "data", None)
    if isinstance(data, str) and data.startswith("0x"):
        found = revert_data({"code": 3, "data": data})
        return describe_revert(found or b"")
    response = getattr(error, "rpc_response", None)
    if isinstance(response, dict):
        found = revert_data(response.get("error"))
        return None if found is None else describe_revert(found)
    kind = type(error).__name__
    if kind == "TransactionFailed":
        text = str(error.args[0]).removeprefix("execution reverted: ") if error.args else ""
        try:
            literal = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return LedgerError(f"the contract refused: {' '.join(text.split())[:200]}")
        return describe_revert(literal if isinstance(literal, bytes) else b"")
    if kind in ("ContractLogicError", "ContractCustomError", "ContractPanicError"):
        return LedgerError(f"the contract refused: {str(error)[:200]}")
    return None
