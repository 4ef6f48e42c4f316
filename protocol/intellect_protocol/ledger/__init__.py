"""Client of the staking contracts.

Reading map:
    artefacts.py    the compiled contracts (`contracts.json`) and their selectors
    deployment.py   deploying them, and the file that says where they are
    records.py      what the contracts answer, one frozen struct each
    events.py       what the contracts log, one frozen struct each
    typed_data.py   what is signed under EIP-712
    merkle.py       the tree over the work of one version
    rpc.py          JSON-RPC with time-outs and fail-over
    reverts.py      one error for every way a chain says no
    fees.py         what a transaction may cost
    journal.py      signed transactions on disk until they are mined
    sending.py      transactions that are mined exactly once
    chain.py        one chain behind web3, blocking
    reading.py      `LedgerReader`: views and events from trio
    client.py       `Ledger`: reading and writing from trio
    devkeys.py      the public keys of development chains
"""
