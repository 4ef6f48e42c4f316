"""Synchronous reads of one chain through web3, with every exception turned into one of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import IntellectError, LedgerError, UnreachableError
from .artefacts import artefacts
from .records import Block
from .reverts import revert_of


@contextmanager
def translated() -> Iterator[None]:
    """Turn what web3, eth-tester and the ABI codec raise into `LedgerError` and `UnreachableError`."""
    from web3.exceptions import Web3Exception

    try:
        yield
    except IntellectError:
        raise
    except Exception as error:
        refusal = revert_of(error)
        if refusal is not None:
            raise refusal from error
        if isinstance(error, OSError):
            raise UnreachableError(f"the chain does not answer: {error}") from error
        text = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, (Web3Exception, ValueError, TypeError, KeyError, IndexError, AttributeError)):
            raise LedgerError(f"the chain refused, or answered something malformed: {text}") from error
        # eth-tester and the ABI codec share no base class with anything.
        if type(error).__module__.split(".")[0] in ("eth_tester", "eth_abi", "eth", "eth_utils", "web3"):
            raise LedgerError(f"the chain refused: {text}") from error
        raise


class Chain:
    """One chain behind a web3 provider. All methods block: call them in threads."""

    def __init__(self, provider: Any) -> None:
        from web3 import Web3

        self.web3 = Web3(provider, middleware=[])
        self._contracts: dict[tuple[str, str], Any] = {}

    def contract(self, name: str, address: str) -> Any:
        """The web3 contract object of an artefact at an address."""
        key = (name, address)
        if key not in self._contracts:
            with translated():
                self._contracts[key] = self.web3.eth.contract(address=address, abi=artefacts()[name].abi)
        return self._contracts[key]

    def view(self, name: str, address: str, function: str, *arguments: Any) -> Any:
        """The result of a view function at the newest block."""
        with translated():
            return self.contract(name, address).functions[function](*arguments).call()

    def chain_id(self) -> int:
        with translated():
            return int(self.web3.eth.chain_id)

    def genesis_hash(self) -> bytes:
        """Hash of block 0: two chains may share an id, never this."""
        return self.block(0).hash

    def block(self, number: int | str = "latest") -> Block:
        """A block by number or tag.

        Raises:
            LedgerError: there is none, or the answer is malformed.
        """
        with translated():
            found: Any = self.web3.eth.get_block(number)
            block = Block(int(found["number"]), bytes(found["hash"]), int(found["timestamp"]))
        if len(block.hash) != 32:
            raise LedgerError("the chain answered a block hash that has not 32 bytes")
        return block

    def next_block_time(self) -> int:
        """Time that a block made now would have, as far as the chain tells; views see it as the present."""
        with translated():
            latest = int(self.web3.eth.get_block("latest")["timestamp"])
            try:
                return max(latest, int(self.web3.eth.get_block("pending")["timestamp"]))
            except UnreachableError:
                raise
            except Exception:  # not every node makes pending blocks, and each refuses in its own way
                return latest

    def balance(self, address: str) -> int:
        with translated():
            return int(self.web3.eth.get_balance(address))

    def has_code(self, address: str) -> bool:
        with translated():
            return len(self.web3.eth.get_code(address)) > 0
