"""Keys on disk and their registration on the real contracts."""

import os
from pathlib import Path

import pytest
from world import OWNER, PARAMETERS, STAKE, STRANGER, World

from intellect_node.identity import (
    Identity,
    is_running,
    lock_data_dir,
    open_identity,
    open_wallet,
    read_password,
    register,
)
from intellect_protocol.errors import BindingError, PreflightError, SlashedError, UsageError, WalletError
from intellect_protocol.keys import LocalSigner, PeerKey, write_keystore

MIN = PARAMETERS.min_stake


def identity_of(folder: Path, wallet: LocalSigner, told: list[str] | None = None) -> Identity:
    folder.mkdir(exist_ok=True)
    return open_identity(folder, wallet, (told if told is not None else []).append)


async def test_the_first_start_stakes_what_is_missing_and_binds_and_says_so(
    world: World, tmp_path: Path
) -> None:
    told: list[str] = []
    identity = identity_of(tmp_path / "node", STRANGER)
    since = await register(world.ledger, identity, None, told.append)
    assert (await world.ledger.account(STRANGER.address)).active == MIN
    binding = await world.ledger.node(identity.node.address)
    assert binding is not None
    assert (binding.owner, binding.peer_id) == (STRANGER.address, identity.peer.peer_id)
    assert since == binding.bound_block
    assert any("staking" in text for text in told)
    assert any(identity.node.address in text for text in told)


async def test_a_second_start_sends_no_transaction(world: World, tmp_path: Path) -> None:
    identity = identity_of(tmp_path / "node", STRANGER)
    since = await register(world.ledger, identity, None, lambda text: None)
    before = (await world.ledger.block()).number
    told: list[str] = []
    assert await register(world.ledger, identity, None, told.append) == since
    assert (await world.ledger.block()).number == before
    assert told == []


async def test_every_node_of_a_wallet_needs_its_own_stake(world: World, tmp_path: Path) -> None:
    for number in range(3):
        identity = identity_of(tmp_path / str(number), STRANGER)
        await register(world.ledger, identity, None, lambda text: None)
    assert (await world.ledger.account(STRANGER.address)).active == 3 * MIN


async def test_the_amount_asked_for_is_staked_if_it_suffices(world: World, tmp_path: Path) -> None:
    identity = identity_of(tmp_path / "node", STRANGER)
    with pytest.raises(UsageError, match="too few"):
        await register(world.ledger, identity, MIN - 1, lambda text: None)
    assert (await world.ledger.account(STRANGER.address)).active == 0
    await register(world.ledger, identity, MIN + 7, lambda text: None)
    assert (await world.ledger.account(STRANGER.address)).active == MIN + 7


async def test_stake_that_is_there_is_not_added_to(world: World, tmp_path: Path) -> None:
    identity = identity_of(tmp_path / "node", OWNER)
    await register(world.ledger, identity, 900, lambda text: None)
    assert (await world.ledger.account(OWNER.address)).active == STAKE


async def test_a_node_key_of_another_wallet_is_a_binding_error_and_nothing_is_sent(
    world: World, tmp_path: Path
) -> None:
    mine = identity_of(tmp_path / "node", OWNER)
    await register(world.ledger, mine, None, lambda text: None)
    mine.lock.release()
    before = (await world.ledger.block()).number
    with pytest.raises(BindingError, match=OWNER.address) as caught:
        await register(world.ledger, identity_of(tmp_path / "node", STRANGER), None, lambda text: None)
    assert caught.value.exit_code == 5
    assert (await world.ledger.block()).number == before


async def test_a_lost_peer_key_is_bound_anew(world: World, tmp_path: Path) -> None:
    identity = identity_of(tmp_path / "node", OWNER)
    await register(world.ledger, identity, None, lambda text: None)
    identity.lock.release()
    (tmp_path / "node" / "peer.key").unlink()
    again = identity_of(tmp_path / "node", OWNER)
    await register(world.ledger, again, None, lambda text: None)
    binding = await world.ledger.node(identity.node.address)
    assert binding is not None
    assert binding.peer_id == again.peer.peer_id != identity.peer.peer_id


async def test_a_wallet_that_cannot_pay_is_told_what_it_lacks(world: World, tmp_path: Path) -> None:
    poor = LocalSigner(b"\x44" * 32)
    with pytest.raises(WalletError, match="holds 0 tokens"):
        await register(world.ledger, identity_of(tmp_path / "a", poor), None, lambda text: None)
    await world.ledger.transfer_token(OWNER, poor.address, MIN)
    with pytest.raises(WalletError, match="no coins"):
        await register(world.ledger, identity_of(tmp_path / "b", poor), None, lambda text: None)


async def test_a_barred_wallet_is_slashed_and_stakes_no_more(world: World, tmp_path: Path) -> None:
    case = await world.open_case()
    world.now += PARAMETERS.window_s + 1
    await world.decide(case, uphold=True)
    tokens = await world.ledger.token_balance(OWNER.address)
    with pytest.raises(SlashedError) as caught:
        await register(world.ledger, identity_of(tmp_path / "node", OWNER), None, lambda text: None)
    assert caught.value.exit_code == 6
    assert await world.ledger.token_balance(OWNER.address) == tokens


def test_key_files_are_made_once_and_for_their_owner_only(tmp_path: Path) -> None:
    told: list[str] = []
    first = identity_of(tmp_path / "node", OWNER, told)
    assert len(told) == 1
    assert first.node.address in told[0]
    first.lock.release()
    second = identity_of(tmp_path / "node", OWNER, told)
    assert (second.node.address, second.peer.peer_id) == (first.node.address, first.peer.peer_id)
    assert len(told) == 1
    for name in ("node.key", "peer.key"):
        assert os.stat(tmp_path / "node" / name).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["node.key", "peer.key"])
def test_a_damaged_key_file_is_an_error_and_stays(tmp_path: Path, name: str) -> None:
    identity_of(tmp_path, OWNER).lock.release()
    (tmp_path / name).write_bytes(b"short")
    with pytest.raises(WalletError):
        identity_of(tmp_path, OWNER)
    assert (tmp_path / name).read_bytes() == b"short"
    lock_data_dir(tmp_path).release()  # the failed start holds no lock


def test_a_second_node_in_a_data_directory_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    held = lock_data_dir(tmp_path)
    assert is_running(tmp_path)
    with pytest.raises(PreflightError, match="already running"):
        lock_data_dir(tmp_path)
    held.release()
    assert not is_running(tmp_path)
    lock_data_dir(tmp_path).release()


def test_the_password_comes_from_the_file_then_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("from a \n")
    (tmp_path / "b").write_text("from b\r\n")
    environ = {"INTELLECT_PASSWORD_FILE": str(tmp_path / "b")}
    assert read_password(tmp_path / "a", environ=environ) == "from a "
    assert read_password(None, environ=environ) == "from b"
    for bad in (tmp_path / "absent", tmp_path):
        with pytest.raises(WalletError):
            read_password(bad)
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    with pytest.raises(WalletError, match="UTF-8"):
        read_password(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"x" * 5000)
    with pytest.raises(WalletError, match="too large"):
        read_password(tmp_path / "a")


def test_a_password_never_shows_in_errors(tmp_path: Path) -> None:
    write_keystore(tmp_path / "wallet", OWNER, "right", light=True)
    (tmp_path / "password").write_text("hunter2")
    with pytest.raises(WalletError, match="wrong password") as caught:
        open_wallet(tmp_path / "wallet", tmp_path / "password")
    assert "hunter2" not in str(caught.value)
    assert PeerKey.create().secret().hex() not in str(caught.value)
