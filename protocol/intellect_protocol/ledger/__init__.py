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
    sending.py      transactions that are sent exactly once
    client.py       `Ledger`, all of it from trio
    devkeys.py      the public keys of development chains
"""
