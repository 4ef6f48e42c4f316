"""Wallets, node keys, peer keys and the binding between them.

Three keys, three jobs. The **wallet** (secp256k1, a keystore v3 file) owns stake. The **node key**
(secp256k1) signs work and cannot move stake. The **peer key** (Ed25519) is the libp2p identity.
The registry contract ties node key and peer id to the wallet; the peer key vouches for the node
key with `sign_binding`, so that the two are one identity in both directions.

Nothing here signs bytes chosen by somebody else: a signature is over a 32-byte digest made under a
domain string of ours, over EIP-712 typed data, or over a transaction.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from eth_keys.datatypes import PrivateKey, PublicKey, Signature
from eth_keys.exceptions import BadSignature, ValidationError

from .errors import BindingError, WalletError, WireError
from .wire import decode_json, sha256, short, u64

# Half the order of secp256k1 (SEC 2, section 2.4.1): a larger s is the malleated twin (EIP-2).
_HALF_ORDER = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0
# libp2p peer-ids specification: identity multihash of the protobuf PublicKey{type: Ed25519, data}.
_ED25519_PEER_PREFIX = bytes.fromhex("002408011220")
_MAX_KEYSTORE_BYTES = 64 * 1024


class Signer(Protocol):
    """What the rest of the project needs of a secp256k1 key; a hardware wallet can provide it."""

    @property
    def address(self) -> str:
        """EIP-55 checksummed address."""
        ...

    def sign_digest(self, digest: bytes) -> bytes:
        """65 bytes r | s | v (v 0 or 1) over a 32-byte digest made under one of our domains."""
        ...

    def sign_typed(self, typed_data: dict[str, Any]) -> bytes:
        """65 bytes r | s | v (v 27 or 28) over EIP-712 typed data (`types`, `domain`, ...)."""
        ...

    def sign_transaction(self, transaction: dict[str, Any]) -> bytes:
        """The signed raw transaction."""
        ...


class LocalSigner:
    """A `Signer` whose secret is in this process."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != 32:
            raise WalletError("a private key has 32 bytes")
        try:
            self._key = PrivateKey(secret)
            self._address: str = self._key.public_key.to_checksum_address()
        except (ValidationError, ValueError) as error:
            raise WalletError("not a valid secp256k1 private key") from error

    @classmethod
    def create(cls) -> LocalSigner:
        """A fresh random key."""
        return cls(secrets.token_bytes(32))

    @property
    def address(self) -> str:
        return self._address

    @property
    def address_bytes(self) -> bytes:
        """The 20 address bytes."""
        return address_bytes(self._address)

    def secret(self) -> bytes:
        """The 32 secret bytes, for writing a keystore and nothing else."""
        return bytes(self._key.to_bytes())

    def sign_digest(self, digest: bytes) -> bytes:
        if len(digest) != 32:
            raise ValueError("a digest has 32 bytes")
        return bytes(self._key.sign_msg_hash(digest).to_bytes())

    def sign_typed(self, typed_data: dict[str, Any]) -> bytes:
        from eth_account import Account
        from eth_account.messages import encode_typed_data

        signed = Account.sign_message(encode_typed_data(full_message=typed_data), self.secret())
        return bytes(signed.signature)

    def sign_transaction(self, transaction: dict[str, Any]) -> bytes:
        from eth_account import Account

        return bytes(Account.sign_transaction(transaction, self.secret()).raw_transaction)

    def __repr__(self) -> str:
        return f"LocalSigner({self._address})"


def address_bytes(address: str) -> bytes:
    """The 20 bytes of a 0x-prefixed hexadecimal address.

    Raises:
        WalletError: not an address.
    """
    try:
        raw = bytes.fromhex(address.removeprefix("0x"))
    except ValueError as error:
        raise WalletError(f"not an address: {address[:64]!r}") from error
    if len(raw) != 20:
        raise WalletError(f"not an address: {address[:64]!r}")
    return raw


def checksum_address(raw: bytes) -> str:
    """EIP-55 text of 20 address bytes."""
    from eth_utils.address import to_checksum_address

    if len(raw) != 20:
        raise WalletError("an address has 20 bytes")
    return str(to_checksum_address(raw))


def recover_address(digest: bytes, signature: bytes) -> str | None:
    """Address that signed `digest`, or None if the signature is malformed or has a high s (EIP-2)."""
    if len(digest) != 32 or len(signature) != 65:
        return None
    if signature[64] in (27, 28):
        signature = signature[:64] + bytes([signature[64] - 27])
    if signature[64] > 1 or int.from_bytes(signature[32:64], "big") > _HALF_ORDER:
        return None
    try:
        public: PublicKey = Signature(signature).recover_public_key_from_msg_hash(digest)
        return str(public.to_checksum_address())
    except (BadSignature, ValidationError, ValueError):
        return None


def load_keystore(path: Path, password: str) -> LocalSigner:
    """Open a keystore v3 file (Web3 Secret Storage; geth and eth-account write the same).

    Raises:
        WalletError: unreadable, not a keystore v3, or the password is wrong.
    """
    from eth_keyfile import decode_keyfile_json

    try:
        if path.stat().st_size > _MAX_KEYSTORE_BYTES:
            raise WalletError(f"{path}: too large for a keystore")
        content = decode_json(path.read_bytes(), max_bytes=_MAX_KEYSTORE_BYTES)
    except OSError as error:
        raise WalletError(f"{path}: {error.strerror or error}") from error
    except WireError as error:
        raise WalletError(f"{path}: not a keystore file (not JSON)") from error
    if not isinstance(content, dict) or content.get("version") != 3:
        raise WalletError(f"{path}: not a keystore v3 file")
    _check_kdf_cost(path, content)
    try:
        return LocalSigner(bytes(decode_keyfile_json(content, password.encode())))
    except ValueError as error:
        if "MAC" in str(error):
            raise WalletError(f"{path}: wrong password") from None
        raise WalletError(f"{path}: damaged keystore") from None
    except (KeyError, TypeError, AttributeError, NotImplementedError, MemoryError):
        raise WalletError(f"{path}: damaged keystore") from None


def _check_kdf_cost(path: Path, content: dict[str, Any]) -> None:
    """Refuse parameters that would take gigabytes or minutes: the file may be anybody's."""
    crypto = content.get("crypto", content.get("Crypto"))
    params = crypto.get("kdfparams") if isinstance(crypto, dict) else None
    if not isinstance(crypto, dict) or not isinstance(params, dict):
        raise WalletError(f"{path}: damaged keystore")
    if crypto.get("cipher") != "aes-128-ctr":
        raise WalletError(f"{path}: cipher {str(crypto.get('cipher'))[:32]!r} is not supported")
    n, r, p, c = (params.get(name, 0) for name in ("n", "r", "p", "c"))
    if not all(isinstance(value, int) and value >= 0 for value in (n, r, p, c)):
        raise WalletError(f"{path}: damaged keystore")
    if n * r * 128 > 1 << 30 or p > 16 or c > 10_000_000:
        raise WalletError(f"{path}: key derivation parameters are unreasonably expensive")


def load_signer(path: Path, password_file: Path | None = None) -> LocalSigner:
    """The key of an operator's role: a file of 32 raw secret bytes, or a keystore v3 file.

    Args:
        password_file: holds the keystore's password (a trailing newline does not count).

    Raises:
        WalletError: unreadable, neither of the two, or a keystore without its password.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_KEYSTORE_BYTES + 1)
        if len(content) == 32:
            return LocalSigner(content)
        if password_file is None:
            raise WalletError(f"{path}: not a raw 32-byte key; a keystore needs --password-file")
        password = password_file.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WalletError(f"{path}: {error}") from error
    return load_keystore(path, password)


def write_keystore(path: Path, signer: LocalSigner, password: str, *, light: bool = False) -> None:
    """Write a keystore v3 file (scrypt, mode 0600); never overwrites.

    Args:
        light: cheap derivation (scrypt N = 4096) for tests and throw-away development wallets.

    Raises:
        WalletError: the file exists or cannot be written.
    """
    from eth_keyfile import create_keyfile_json

    # eth-keyfile wants the work factor as `iterations` = scrypt N; geth's "light" uses 4096.
    keyfile = create_keyfile_json(
        signer.secret(), password.encode(), kdf="scrypt", iterations=4096 if light else None
    )
    write_secret(path, json.dumps(keyfile).encode())


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file with mode 0600 in a folder with mode 0700, durably; never overwrites.

    Raises:
        WalletError: the file exists or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise WalletError(f"{path} exists; nothing was changed") from error
    except OSError as error:
        raise WalletError(f"{path}: {error.strerror or error}") from error


class PeerKey:
    """The Ed25519 identity of a libp2p host."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != 32:
            raise WalletError("a peer key has 32 bytes")
        self._secret = secret
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self._public = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @classmethod
    def create(cls) -> PeerKey:
        """A fresh random key."""
        key = Ed25519PrivateKey.generate()
        return cls(key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption()))

    @classmethod
    def load_or_create(cls, path: Path) -> PeerKey:
        """The key in `path` (32 raw bytes, mode 0600), made on first use.

        Raises:
            WalletError: the file is damaged or cannot be read or written.
        """
        try:
            return cls(path.read_bytes())
        except FileNotFoundError:
            key = cls.create()
            write_secret(path, key.secret())
            return key
        except OSError as error:
            raise WalletError(f"{path}: {error.strerror or error}") from error

    def secret(self) -> bytes:
        """The 32 secret bytes (seed)."""
        return self._secret

    @property
    def peer_id(self) -> bytes:
        """38 bytes: the identity multihash of the public key (libp2p peer-ids specification)."""
        return _ED25519_PEER_PREFIX + self._public

    def sign_binding(self, chain_id: int, registry: str, node: str) -> bytes:
        """64-byte Ed25519 signature by which this peer vouches for a node key."""
        return self._key.sign(binding_digest(chain_id, registry, node))


def binding_digest(chain_id: int, registry: str, node: str) -> bytes:
    """The 32 bytes a peer key signs to vouch for a node key (domain ``intellect/peer-binding/1``)."""
    return sha256(b"intellect/peer-binding/1", u64(chain_id), address_bytes(registry), address_bytes(node))


def vouch_digest(chain_id: int, registry: str, peer_id: bytes) -> bytes:
    """The 32 bytes a node key signs to vouch for a peer key: the other direction of `binding_digest`."""
    return sha256(b"intellect/peer-vouch/1", u64(chain_id), address_bytes(registry), short(peer_id))


def check_binding(peer_id: bytes, chain_id: int, registry: str, node: str, signature: bytes) -> None:
    """Check that `peer_id` vouched for `node`.

    Raises:
        BindingError: it did not.
    """
    try:
        public = Ed25519PublicKey.from_public_bytes(peer_public_key(peer_id))
        public.verify(signature, binding_digest(chain_id, registry, node))
    except (InvalidSignature, ValueError) as error:
        raise BindingError(f"peer {peer_id_text(peer_id)} did not vouch for node key {node}") from error


def peer_public_key(peer_id: bytes) -> bytes:
    """The raw 32-byte Ed25519 public key inside a peer id.

    Raises:
        BindingError: not the peer id of an Ed25519 key.
    """
    if len(peer_id) != 38 or not peer_id.startswith(_ED25519_PEER_PREFIX):
        raise BindingError("not the peer id of an Ed25519 key")
    return peer_id[len(_ED25519_PEER_PREFIX) :]


def peer_id_text(peer_id: bytes) -> str:
    """Base58 text of a peer id, as in multiaddresses."""
    return str(base58.b58encode(peer_id).decode())


def load_or_create_node_key(path: Path) -> tuple[LocalSigner, bool]:
    """The node key in `path` (32 raw bytes, mode 0600) and whether it was made just now.

    Raises:
        WalletError: the file is damaged or cannot be read or written.
    """
    try:
        return LocalSigner(path.read_bytes()), False
    except FileNotFoundError:
        signer = LocalSigner.create()
        write_secret(path, signer.secret())
        return signer, True
    except OSError as error:
        raise WalletError(f"{path}: {error.strerror or error}") from error


def work_digest(
    run_id: bytes, version: int, checkpoint_hash: bytes, index: int, file_hash: bytes, size_bytes: int
) -> bytes:
    """What a node key signs for one unit of work; it covers C and names no audience."""
    return sha256(
        b"intellect/work/1", run_id, u64(version), checkpoint_hash, u64(index), file_hash, u64(size_bytes)
    )


def announcement_digest(run_id: bytes, version: int, checkpoint_hash: bytes, manifest_bytes: int) -> bytes:
    """What the publisher key signs to announce a version on gossip."""
    return sha256(b"intellect/announce/1", run_id, u64(version), checkpoint_hash, u64(manifest_bytes))


def manifest_digest(checkpoint_hash: bytes) -> bytes:
    """What the publisher key signs over a checkpoint manifest."""
    return sha256(b"intellect/manifest/1", checkpoint_hash)


def receipt_digest(
    run_id: bytes, version: int, index: int, node: bytes, file_hash: bytes, received_at_ms: int
) -> bytes:
    """What the coordinator key signs once a submission is durably stored."""
    return sha256(
        b"intellect/receipt/1", run_id, u64(version), u64(index), short(node), file_hash, u64(received_at_ms)
    )


def verdict_digest(run_id: bytes, job_id: bytes, content: bytes) -> bytes:
    """What a validator key signs over the canonical bytes of its verdict."""
    return sha256(b"intellect/verdict/1", run_id, short(job_id), sha256(content))


def revision_digest(run_id: bytes, content: bytes) -> bytes:
    """What the coordinator key signs over a revision of the mutable part of a run configuration."""
    return sha256(b"intellect/revision/1", run_id, sha256(content))
