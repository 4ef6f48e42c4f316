"""`intellect-node wallet`: keystore v3 files, as geth and eth-account write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from intellect_protocol.program import EXIT_CODES

from .options import JsonOption, PasswordOption, print_json

if TYPE_CHECKING:
    from intellect_protocol.keys import LocalSigner

app = typer.Typer(help="Make, show and import wallets.", no_args_is_help=True, epilog=EXIT_CODES)

FileArgument = Annotated[Path, typer.Argument(help="Keystore v3 file.")]


@app.command()
def new(
    file: FileArgument,
    password_file: PasswordOption = None,
) -> None:
    """Make a new wallet; an existing file is never overwritten."""
    from intellect_protocol.keys import LocalSigner

    _write(file, password_file, LocalSigner.create)


@app.command("import")
def import_(
    file: FileArgument,
    source: Annotated[
        Path, typer.Argument(help="File with a private key of 32 bytes: raw, or in hexadecimal digits.")
    ],
    password_file: PasswordOption = None,
) -> None:
    """Make a wallet from an existing private key; an existing file is never overwritten."""
    _write(file, password_file, lambda: read_secret(source))


@app.command()
def show(file: FileArgument, json: JsonOption = False) -> None:
    """Address of a wallet, without its password."""
    address = keystore_address(file)
    if json:
        print_json({"address": address, "file": str(file)})
    else:
        typer.echo(address)


def _write(file: Path, password_file: Path | None, make: Callable[[], LocalSigner]) -> None:
    from intellect_protocol.errors import WalletError
    from intellect_protocol.keys import write_keystore

    from .identity import new_password

    if file.exists():
        raise WalletError(f"{file} exists; nothing was changed")
    signer = make()
    write_keystore(file, signer, new_password(password_file))
    typer.echo(f"wallet {signer.address} in {file}")
    typer.echo("Keep a copy of the file and its passphrase: nobody can restore either.")


def read_secret(path: Path) -> LocalSigner:
    """The key in a file of 32 raw bytes or 64 hexadecimal digits.

    Raises:
        WalletError: unreadable, or neither.
    """
    from intellect_protocol.errors import WalletError
    from intellect_protocol.keys import LocalSigner

    try:
        with path.open("rb") as file:
            content = file.read(257)
    except OSError as error:
        raise WalletError(f"{path}: {error.strerror or error}") from error
    if len(content) == 32:
        return LocalSigner(content)
    try:
        return LocalSigner(bytes.fromhex(content.decode().strip().removeprefix("0x")))
    except (UnicodeDecodeError, ValueError):
        raise WalletError(f"{path}: not a private key of 32 bytes (raw or hexadecimal)") from None


def keystore_address(path: Path) -> str:
    """The address that a keystore file names.

    Raises:
        WalletError: unreadable, or not a keystore with an address.
    """
    import msgspec

    from intellect_protocol.errors import WalletError
    from intellect_protocol.keys import address_bytes, checksum_address

    class Keystore(msgspec.Struct):
        version: int
        address: str

    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(64 * 1024), type=Keystore)
    except OSError as error:
        raise WalletError(f"{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise WalletError(f"{path}: not a keystore v3 file that names its address") from error
    if found.version != 3:
        raise WalletError(f"{path}: not a keystore v3 file")
    return checksum_address(address_bytes(found.address))
