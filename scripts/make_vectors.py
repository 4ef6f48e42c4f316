"""Write tests/vectors/protocol.json: one example of every rule that `docs/protocol.md` marks.

Run it only when the protocol changes; a changed vector is a changed protocol.
"""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path

from intellect_protocol import assignment, checkpoint, keys, run, sampling, wire
from intellect_protocol.ledger import merkle

RUN = b"\x01" * 32
CHECKPOINT = b"\x02" * 32
BLOCK = b"\x03" * 32
NODE = keys.LocalSigner(b"\x04" * 32)


def safetensors_bytes() -> bytes:
    """A file with two tensors whose order in the file is not the order of their names."""
    header = json.dumps(
        {
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "a": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]},
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.0, -2.0) + b"\x80\x3f\x00\x40"


def terms() -> run.RunTerms:
    """Small terms with every field set."""
    return run.RunTerms(
        name="vector",
        protocol=1,
        model=run.ModelTerms("LlamaForCausalLM", 100, 64, 256, "float32", "ab" * 32, False),
        environments=[
            run.EnvironmentTerms("sort_digits", 2, {"max_digits": 8}),
            run.EnvironmentTerms("arithmetic"),
        ],
        sampling=run.SamplingTerms(1.0, 20, [1], 4, 8, 0, 1.0, [10, 20]),
        ledger=run.LedgerTerms(31337, {"StakeLedger": NODE.address}),
        keys=run.KeyTerms(NODE.address, NODE.address),
    )


def vectors() -> dict[str, object]:
    """All examples, bytes in hexadecimal."""
    seed = assignment.unit_seed(RUN, 3, CHECKPOINT, BLOCK, NODE.address_bytes, 7)
    slot = assignment.prompt_slot(seed, 1, terms())
    sigma = assignment.stream_seed(seed, 1, 2)
    envelope = wire.Envelope(
        RUN,
        31337,
        b"\x05" * 38,
        "GetVerdicts",
        wire.content_hash(b"payload", wire.sha256(b"body")),
        1000,
        b"\x06" * 16,
    )
    work = keys.work_digest(RUN, 3, CHECKPOINT, 7, b"\x07" * 32, 1234)
    leaves = [merkle.WorkLeaf(3, i, NODE.address, bytes([i]) * 32, i % 2 == 0, 8 * i) for i in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(safetensors_bytes())
        (Path(folder) / "config.json").write_text("{}")
        manifest = checkpoint.build_manifest(
            Path(folder),
            run_id=RUN,
            version=3,
            parent_version=2,
            probe=checkpoint.Probe([1, 2], [-0.5]),
            batches=[b"\x08" * 32],
            created_at_ms=1000,
            publisher=NODE.address,
        )
    return {
        "run": {"terms_msgpack": wire.encode(terms()).hex(), "run_id": run.run_id(terms()).hex()},
        "assignment": {
            "seed": seed.hex(),
            "prompt_1": {
                "environment": slot.environment,
                "task_index": slot.task_index,
                "target_length": slot.target_length,
            },
            "sigma_1_2": sigma.hex(),
            "uniforms": [sampling.uniform(sigma, t) for t in range(4)],
        },
        "request_digest": envelope.digest().hex(),
        "content_hash": envelope.content_hash.hex(),
        "work": {"digest": work.hex(), "signature": NODE.sign_digest(work).hex(), "node": NODE.address},
        "receipt_digest": keys.receipt_digest(RUN, 3, 7, NODE.address_bytes, b"\x07" * 32, 1000).hex(),
        "chunk_merkle_roots": {
            str(count): checkpoint.merkle_root([bytes([i]) * 32 for i in range(count)]).hex()
            for count in (1, 2, 3, 5)
        },
        "checkpoint": {
            "safetensors": safetensors_bytes().hex(),
            "state_hash": manifest.state_hash.hex(),
            "manifest": wire.encode(manifest).hex(),
            "checkpoint_hash": checkpoint.checkpoint_hash(wire.encode(manifest)).hex(),
        },
        "work_root": {
            "leaves": [merkle.leaf_hash(RUN, leaf).hex() for leaf in leaves],
            "root": merkle.merkle_root([merkle.leaf_hash(RUN, leaf) for leaf in leaves]).hex(),
        },
    }


if __name__ == "__main__":
    target = Path(__file__).parent.parent / "tests" / "vectors" / "protocol.json"
    target.write_text(json.dumps(vectors(), indent=1) + "\n")
