"""Wallets, node keys and peer keys."""

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intellect_protocol import keys
from intellect_protocol.errors import BindingError, WalletError

# Web3 Secret Storage Definition, version 3: its published scrypt test vector.
_PUBLISHED = {
    "crypto": {
        "cipher": "aes-128-ctr",
        "cipherparams": {"iv": "83dbcc02d8ccb40e466191a123791e0e"},
        "ciphertext": "d172bf743a674da9cdad04534d56926ef8358534d458fffccd4e6ad2fbde479c",
        "kdf": "scrypt",
        "kdfparams": {
            "dklen": 32,
            "n": 262144,
            "p": 8,
            "r": 1,
            "salt": "ab0c7876052600dd703518d6fc3fe8984592145b591fc8fb5c6d43190334ba19",
        },
        "mac": "2103ac29920d71da29f15d75b4a16dbe95cfd7ff8faea1056c33131d846e3097",
    },
    "id": "3198bc9c-6672-5ab3-d995-4942343ae5b6",
    "version": 3,
}
_PUBLISHED_SECRET = "7a28b5ba57c53603b0b07b56bba752f7784bf506fa95edc395f5cf6c7514fe9d"


def test_a_keystore_written_by_another_program_opens(tmp_path: Path) -> None:
    path = tmp_path / "wallet.json"
    path.write_text(json.dumps(_PUBLISHED))
    assert keys.load_keystore(path, "testpassword").secret().hex() == _PUBLISHED_SECRET


def test_a_keystore_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "wallet.json"
    signer = keys.LocalSigner.create()
    keys.write_keystore(path, signer, "pass", light=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.read_bytes()
    with pytest.raises(WalletError, match="nothing was changed"):
        keys.write_keystore(path, keys.LocalSigner.create(), "pass", light=True)
    assert path.read_bytes() == before
    assert keys.load_keystore(path, "pass").address == signer.address


def test_a_wrong_password_says_so_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "wallet.json"
    signer = keys.LocalSigner.create()
    keys.write_keystore(path, signer, "right", light=True)
    with pytest.raises(WalletError, match="wrong password") as caught:
        keys.load_keystore(path, "wrong")
    assert "right" not in str(caught.value)
    assert signer.secret().hex() not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"version": 3}',
        b'{"version": 3, "crypto": {"kdfparams": {"n": 1073741824, "r": 8, "p": 1}}}',
        b'{"version": 3, "crypto": {"kdfparams": {"n": "x"}}}',
        json.dumps({**_PUBLISHED, "version": 1}).encode(),
        json.dumps({**_PUBLISHED, "crypto": {**_PUBLISHED["crypto"], "cipher": "none"}}).encode(),
        b"{" + b" " * 70_000 + b"}",
    ],
)
def test_a_damaged_keystore_is_a_wallet_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wallet.json"
    path.write_bytes(content)
    with pytest.raises(WalletError):
        keys.load_keystore(path, "testpassword")


@given(st.binary(min_size=32, max_size=32))
def test_a_signature_gives_back_its_signer_and_its_twin_is_refused(digest: bytes) -> None:
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
    signer = keys.LocalSigner(b"\x01" * 32)
    signature = signer.sign_digest(digest)
    assert keys.recover_address(digest, signature) == signer.address
    high_s = (order - int.from_bytes(signature[32:64], "big")).to_bytes(32, "big")
    twin = signature[:32] + high_s + bytes([1 - signature[64]])
    assert keys.recover_address(digest, twin) is None


@given(st.binary(max_size=80), st.binary(max_size=40))
def test_arbitrary_signatures_never_raise(signature: bytes, digest: bytes) -> None:
    keys.recover_address(digest, signature)


def test_peer_and_node_key_vouch_for_exactly_each_other() -> None:
    peer, node = keys.PeerKey.create(), keys.LocalSigner.create()
    registry = keys.LocalSigner.create().address
    signature = peer.sign_binding(5, registry, node.address)
    keys.check_binding(peer.peer_id, 5, registry, node.address, signature)
    for chain, contract, address, peer_id in (
        (6, registry, node.address, peer.peer_id),
        (5, node.address, node.address, peer.peer_id),
        (5, registry, registry, peer.peer_id),
        (5, registry, node.address, keys.PeerKey.create().peer_id),
        (5, registry, node.address, b"not a peer id"),
    ):
        with pytest.raises(BindingError):
            keys.check_binding(peer_id, chain, contract, address, signature)


def test_peer_ids_are_those_of_libp2p() -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    peer = keys.PeerKey.create()
    other = ID.from_pubkey(create_new_key_pair(peer.secret()).public_key)
    assert peer.peer_id == other.to_bytes()
    assert keys.peer_id_text(peer.peer_id) == other.to_base58()


def test_key_files_are_made_once_and_read_again(tmp_path: Path) -> None:
    first, made = keys.load_or_create_node_key(tmp_path / "node.key")
    second, made_again = keys.load_or_create_node_key(tmp_path / "node.key")
    assert (made, made_again) == (True, False)
    assert first.address == second.address
    assert keys.PeerKey.load_or_create(tmp_path / "peer.key").peer_id == (
        keys.PeerKey.load_or_create(tmp_path / "peer.key").peer_id
    )
    (tmp_path / "short.key").write_bytes(b"short")
    with pytest.raises(WalletError):
        keys.load_or_create_node_key(tmp_path / "short.key")
