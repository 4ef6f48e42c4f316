"""The development chain: what was acknowledged is there after kill -9, with the same hashes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devchain_process import DevchainProcess

from intellect_coordinator.devchain import MAX_BATCH, MAX_REQUEST_BYTES, run_devchain
from intellect_protocol.errors import ConfigError, LedgerError, PreflightError
from intellect_protocol.ledger.chain import Chain
from intellect_protocol.ledger.client import Ledger
from intellect_protocol.ledger.deployment import Deployment, LedgerParameters, deploy
from intellect_protocol.ledger.devkeys import development_signer
from intellect_protocol.ledger.rpc import FailoverProvider
from intellect_protocol.ledger.sending import TransactionQueue

DEPLOYER, COORDINATOR, PUBLISHER = map(development_signer, (0, 1, 2))
RECEIVER = "0x00000000000000000000000000000000000000A1"
RUN = b"R" * 32


@pytest.fixture
def process(tmp_path: Path) -> Iterator[DevchainProcess]:
    started = DevchainProcess(tmp_path / "chain")
    yield started
    if started.process.poll() is None:
        started.stop()


async def _deploy(url: str, state_dir: Path) -> Deployment:
    provider = FailoverProvider([url])
    queue = TransactionQueue(Chain(provider), state_dir)
    parameters = LedgerParameters.development(
        validators=[development_signer(index).address for index in (3, 4, 5)],
        coordinator=COORDINATOR.address,
    )
    try:
        return await deploy(queue, DEPLOYER, parameters)
    finally:
        queue.close()
        provider.close()


def _ask(process: DevchainProcess, method: str, *params: Any) -> Any:
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return json.loads(process.post(json.dumps(request).encode())[1])


async def test_after_kill_9_the_chain_goes_on_from_its_last_block_with_the_same_hashes(
    process: DevchainProcess, tmp_path: Path
) -> None:
    deployment = await _deploy(process.url, tmp_path / "state")
    ledger = Ledger([process.url], deployment, tmp_path / "state")
    await ledger.open_run(COORDINATOR, RUN, PUBLISHER.address)
    for version in range(3):
        await ledger.record_checkpoint(PUBLISHER, RUN, version, bytes([version + 1]) * 32)
    recorded = [await ledger.checkpoint(RUN, version) for version in range(3)]
    head = (await ledger.block()).number
    blocks = [await ledger.block(number) for number in range(head + 1)]
    events = await ledger.events(0, head)
    process.kill()

    restarted = DevchainProcess(tmp_path / "chain", process.port)
    try:
        assert await ledger.chain_id() == deployment.chain_id
        assert (await ledger.block()).number == head
        assert [await ledger.block(number) for number in range(head + 1)] == blocks
        assert [await ledger.checkpoint(RUN, version) for version in range(3)] == recorded
        assert await ledger.events(0, head) == events
        await ledger.check()
        await ledger.record_checkpoint(PUBLISHER, RUN, 3, b"\4" * 32)
        following = await ledger.block(head + 1)
        assert following.time >= blocks[-1].time
        assert await ledger.latest_version(RUN) == 3
    finally:
        restarted.stop()
        ledger.close()


async def test_blocks_of_one_second_share_a_time_and_the_clock_follows_the_wall(
    process: DevchainProcess, tmp_path: Path
) -> None:
    provider = FailoverProvider([process.url])
    queue = TransactionQueue(Chain(provider), tmp_path)
    receipts = [await queue.send(DEPLOYER, RECEIVER, value=1) for _ in range(30)]
    times = [queue._chain.block(receipt.block_number).time for receipt in receipts]
    assert times == sorted(times)
    # Sent within seconds of each other: not one second of chain time per block.
    assert len(set(times)) < len(times)
    queue.close()
    provider.close()


async def test_increased_time_lasts_over_a_restart(process: DevchainProcess, tmp_path: Path) -> None:
    chain = Chain(FailoverProvider([process.url]))
    before = chain.next_block_time()
    assert "result" in _ask(process, "evm_increaseTime", 100_000)
    assert chain.next_block_time() >= before + 100_000
    process.kill()
    restarted = DevchainProcess(tmp_path / "chain", process.port)
    assert chain.next_block_time() >= before + 100_000
    restarted.stop()


def test_it_says_loudly_what_it_is_and_ends_cleanly(process: DevchainProcess) -> None:
    text = "\n".join(process.banner)
    assert "DEVELOPMENT CHAIN" in text
    assert "keys of its accounts are public" in text
    assert process.stop() == 0


def test_a_chain_begun_anew_has_an_id_of_its_own(process: DevchainProcess, tmp_path: Path) -> None:
    other = DevchainProcess(tmp_path / "other")
    assert _ask(other, "eth_chainId")["result"] != _ask(process, "eth_chainId")["result"]
    other.stop()


def test_one_directory_holds_one_running_chain(process: DevchainProcess, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs here"):
        run_devchain(tmp_path / "chain", 0, output=lambda line: None)


def test_a_taken_port_is_one_clear_error(process: DevchainProcess, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="is taken"):
        run_devchain(tmp_path / "second", process.port, output=lambda line: None)


def test_a_damaged_or_foreign_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "devchain.sqlite").write_bytes(b"not a database, " * 1000)
    with pytest.raises(ConfigError, match=r"devchain\.sqlite"):
        run_devchain(tmp_path, 0, output=lambda line: None)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", -32700),
        (b"{", -32700),
        (b"[" * 5000, -32700),
        (b"[]", -32600),
        (b"7", -32600),
        (json.dumps([{}] * (MAX_BATCH + 1)).encode(), -32600),
        (b'{"id":1,"method":"eth_nothing"}', -32601),
        (b'{"id":1,"method":["eth_chainId"]}', -32601),
        (b'{"id":1,"method":"eth_chainId","params":{}}', -32602),
        (b'{"id":1,"method":"eth_chainId","params":[1,2,3]}', -32602),
        (b'{"id":1,"method":"eth_getBalance","params":["0x12"]}', -32602),
        (b'{"id":1,"method":"eth_getBalance","params":[7]}', -32602),
        (b'{"id":1,"method":"eth_getBlockByHash","params":[{}]}', -32602),
        (b'{"id":1,"method":"eth_call","params":[{"data":"0xzz"}]}', -32602),
        (b'{"id":1,"method":"eth_call","params":[{"value":"0x' + b"f" * 80 + b'"}]}', -32602),
        (b'{"id":1,"method":"eth_getLogs","params":[{"fromBlock":true}]}', -32602),
        (b'{"id":1,"method":"eth_getLogs","params":[{"topics":[[1]]}]}', -32602),
        (b'{"id":1,"method":"eth_sendRawTransaction","params":["0x00"]}', -32000),
        (b'{"id":1,"method":"eth_sendRawTransaction","params":["0x02f8"]}', -32000),
        (b'{"id":1,"method":"evm_increaseTime","params":[-1]}', -32602),
    ],
)
def test_malformed_requests_get_an_error_answer(body: bytes, code: int, shared: DevchainProcess) -> None:
    status, answer = shared.post(body)
    assert status == 200
    assert json.loads(answer)["error"]["code"] == code
    assert "result" in _ask(shared, "eth_blockNumber")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevchainProcess]:
    started = DevchainProcess(tmp_path_factory.mktemp("shared"))
    yield started
    started.stop()


def test_oversize_requests_and_those_of_web_pages_are_refused(shared: DevchainProcess) -> None:
    assert shared.post(b"x" * (MAX_REQUEST_BYTES + 1))[0] == 413
    assert shared.post(b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert shared.post(b"{}", Host="rebound.example")[0] == 403
    assert "result" in _ask(shared, "eth_blockNumber")


def test_a_batch_is_answered_in_order(shared: DevchainProcess) -> None:
    requests = [{"id": number, "method": "eth_chainId"} for number in range(5)]
    answers = json.loads(shared.post(json.dumps(requests).encode())[1])
    assert [answer["id"] for answer in answers] == [0, 1, 2, 3, 4]


def _signed(process: DevchainProcess, **changes: Any) -> str:
    nonce = int(_ask(process, "eth_getTransactionCount", DEPLOYER.address, "latest")["result"], 16)
    transaction = {
        "type": 2,
        "chainId": int(_ask(process, "eth_chainId")["result"], 16),
        "nonce": nonce,
        "to": RECEIVER,
        "value": 1,
        "data": b"",
        "gas": 21_000,
        "maxFeePerGas": 10**11,
        "maxPriorityFeePerGas": 1,
        **changes,
    }
    return "0x" + DEPLOYER.sign_transaction(transaction).hex()


def test_transactions_that_cannot_be_in_a_block_change_nothing(shared: DevchainProcess) -> None:
    before = _ask(shared, "eth_blockNumber")["result"]
    nonce = int(_ask(shared, "eth_getTransactionCount", DEPLOYER.address, "latest")["result"], 16)
    for changes, reason in (
        ({"chainId": 1}, "signed for chain 1"),
        ({"nonce": nonce + 1}, "nonce too high"),
        ({"value": 10**30}, "balance"),
        ({"gas": 20_000}, ""),
        ({"gas": 10**9}, "gas limit"),
        ({"maxFeePerGas": 1}, ""),
    ):
        answer = _ask(shared, "eth_sendRawTransaction", _signed(shared, **changes))
        assert answer["error"]["code"] == -32000, changes
        assert reason in answer["error"]["message"]
    assert _ask(shared, "eth_blockNumber")["result"] == before
    raw = _signed(shared)
    hash_ = _ask(shared, "eth_sendRawTransaction", raw)["result"]
    assert _ask(shared, "eth_getTransactionReceipt", hash_)["result"]["status"] == "0x1"
    assert _ask(shared, "eth_getTransactionByHash", hash_)["result"]["value"] == "0x1"
    assert "already known" in _ask(shared, "eth_sendRawTransaction", raw)["error"]["message"]


async def test_a_call_that_reverts_answers_with_the_data_of_the_revert(
    shared: DevchainProcess, tmp_path: Path
) -> None:
    deployment = await _deploy(shared.url, tmp_path)
    ledger = Ledger([shared.url], deployment, tmp_path)
    with pytest.raises(LedgerError) as caught:
        await ledger.case(1)
    assert caught.value.name == "SlashCourtUnknownCase"
    with pytest.raises(LedgerError) as caught:
        await ledger.withdraw(DEPLOYER)
    assert caught.value.name == "StakeLedgerNothingToWithdraw"
    ledger.close()


_CLIENT = """
import os, signal, sys
from pathlib import Path
import trio
from intellect_protocol.ledger.chain import Chain
from intellect_protocol.ledger.devkeys import development_signer
from intellect_protocol.ledger.rpc import FailoverProvider
from intellect_protocol.ledger.sending import TransactionQueue

url, state, moment = sys.argv[1:]

class Mortal(FailoverProvider):
    def make_request(self, method, params):
        sending = method == "eth_sendRawTransaction"
        if sending and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = super().make_request(method, params)
        if sending and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

async def main():
    queue = TransactionQueue(Chain(Mortal([url])), Path(state))
    receipt = await queue.send(development_signer(0), "RECEIVER", value=5, intent="pay")
    print(receipt.block_number)
    queue.close()

trio.run(main)
""".replace("RECEIVER", RECEIVER)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_client_killed_between_signing_and_receipt_sends_once(
    shared: DevchainProcess, tmp_path: Path, moment: str
) -> None:
    def client(moment: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-c", _CLIENT, shared.url, str(tmp_path / "state"), moment]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=60)

    def balance() -> int:
        return int(_ask(shared, "eth_getBalance", RECEIVER)["result"], 16)

    before = balance()
    assert client(moment).returncode == -signal.SIGKILL
    assert balance() == before + (5 if moment == "after" else 0)
    for _ in range(2):
        result = client("never")
        assert result.returncode == 0, result.stderr
        assert balance() == before + 5
