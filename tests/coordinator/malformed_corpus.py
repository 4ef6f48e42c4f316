"""Files that no honest node would send: all that can be wrong about a rollout file, made from a good one.

`fixed_cases` lists them by name; `damaged` makes any number more by changing bytes at random.
"""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from intellect_protocol import toploc
from intellect_protocol.rollouts import (
    BATCH_SCHEMA,
    ROLLOUT_SCHEMA,
    EngineNote,
    FileLimits,
    Rollout,
    RolloutUnit,
    UnitMeta,
    read_unit,
    write_unit,
)
from intellect_protocol.wire import encode

GOOD = "good.parquet"
BOMB_VALUES = 50_000_000
"""Enough to need some hundred megabytes once unpacked, and a few kilobytes before."""


@dataclass(frozen=True)
class Case:
    """One file.

    Attributes:
        fraud: its node is to be called a cheat (True), its work void (False), or either (None).
    """

    name: str
    data: bytes
    fraud: bool | None


def damaged(good: bytes, count: int, seed: int) -> Iterator[Case]:
    """`good` with some bytes changed, cut out, doubled or cut off, half of the time in its footer."""
    rng = random.Random(seed)
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    for number in range(count):
        data = bytearray(good)
        first = footer if rng.random() < 0.5 else 0
        what = rng.choice(["flip", "flip", "flip", "cut", "remove", "double"])
        if what == "flip":
            for _ in range(rng.choice([1, 1, 2, 5, 50])):
                data[rng.randrange(first, len(data))] = rng.randrange(256)
        elif what == "cut":
            del data[rng.randrange(first, len(data)) :]
        else:
            start = rng.randrange(first, len(data))
            piece = data[start : start + rng.randrange(1, 200)]
            data[start : start + len(piece)] = b"" if what == "remove" else piece * 2
        yield Case(f"{what} {seed}/{number}", bytes(data), None)


def write_corpus(folder: Path, good: bytes, limits: FileLimits) -> None:
    """The good file and all fixed cases, one file each."""
    folder.mkdir()
    (folder / GOOD).write_bytes(good)
    index = []
    for number, case in enumerate(fixed_cases(read_unit(good, limits))):
        (folder / str(number)).write_bytes(case.data)
        index.append((case.name, case.fraud))
    (folder / "index.json").write_text(json.dumps(index))


def read_corpus(folder: Path) -> Iterator[Case]:
    """What `write_corpus` wrote, without the good file."""
    for number, (name, fraud) in enumerate(json.loads((folder / "index.json").read_text())):
        yield Case(name, (folder / str(number)).read_bytes(), fraud)


def fixed_cases(good: RolloutUnit) -> Iterator[Case]:
    """Every kind of file with a name."""
    yield from _not_parquet(write_unit(good))
    yield from _other_tables(good)
    yield from _bombs(good)
    yield from _other_metadata(good)
    number = max(range(len(good.rows)), key=lambda row: len(good.rows[row].completion_tokens))
    for name, fraud, changes in _bad_rows(good.rows[number]):
        yield Case(name, _changed(good, number, **changes), fraud)
    for name, fraud, rows in _bad_orders(good.rows):
        yield Case(name, write_unit(RolloutUnit(good.meta, rows)), fraud)
    for name, proofs in _bad_proofs(good.rows[0], good.rows[-1]):
        yield Case(f"proofs: {name}", _changed(good, 0, proofs=proofs), True)


def _changed(unit: RolloutUnit, number: int, **changes: Any) -> bytes:
    rows = list(unit.rows)
    rows[number] = msgspec.structs.replace(rows[number], **changes)
    return write_unit(RolloutUnit(unit.meta, rows))


def _not_parquet(good: bytes) -> Iterator[Case]:
    rng = random.Random(0)
    pieces = {
        "one byte": b"\0",
        "magic only": b"PAR1",
        "magic twice": b"PAR1PAR1",
        "random bytes": rng.randbytes(5000),
        "random bytes in magic": b"PAR1" + rng.randbytes(5000) + b"PAR1",
        "zeros": bytes(100_000),
        "a zip header": b"PK\x03\x04" + bytes(500),
        "text": b"{" * 10_000,
        "no end": good[:-1],
        "no beginning": good[1:],
        "half": good[: len(good) // 2],
        "garbage at the end": good + b"\0",
        "footer longer than the file": good[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "footer of no length": good[:-8] + struct.pack("<I", 0) + b"PAR1",
        "encrypted footer": good[:-4] + b"PARE",
    }
    for name, data in pieces.items():
        yield Case(name, data, False)


def _file(table: pa.Table, meta: UnitMeta, **options: Any) -> bytes:
    sink = io.BytesIO()
    options = {"compression": "zstd", **options}
    pq.write_table(table.replace_schema_metadata({b"intellect": encode(meta)}), sink, **options)
    return sink.getvalue()


def _table(rows: list[Rollout]) -> pa.Table:
    columns = [
        pa.array([getattr(row, field.name) for row in rows], type=field.type) for field in ROLLOUT_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=ROLLOUT_SCHEMA)


def _other_tables(good: RolloutUnit) -> Iterator[Case]:
    table = _table(good.rows)
    nullable = pa.schema([field.with_nullable(True) for field in ROLLOUT_SCHEMA])

    def typed(name: str, kind: pa.DataType) -> pa.Table:
        place = ROLLOUT_SCHEMA.get_field_index(name)
        values = pa.array(table.column(name).to_pylist(), type=kind)
        return table.set_column(place, pa.field(name, kind, nullable=False), values)

    nulls = table.cast(nullable).to_pydict()
    nulls["reward"][3] = None
    tables: dict[str, pa.Table] = {
        "no columns": table.select([]),
        "a column missing": table.drop_columns(["proofs"]),
        "a column too many": table.append_column("extra", pa.array([0] * len(table))),
        "a column renamed": table.rename_columns(["unit", *table.column_names[1:]]),
        "columns in another order": table.select(table.column_names[::-1]),
        "a column twice": table.append_column(ROLLOUT_SCHEMA.field(0), table.column(0)),
        "the columns of a batch file": table.select(BATCH_SCHEMA.names),
        "columns that may be null": table.cast(nullable),
        "a null": pa.table(nulls, schema=nullable),
        "wide rewards": typed("reward", pa.float64()),
        "signed tokens": typed("completion_tokens", pa.list_(pa.int64())),
        "tokens as floats": typed("completion_tokens", pa.list_(pa.float32())),
        "long lists": typed("prompt_tokens", pa.large_list(pa.uint32())),
        "nested proofs": table.set_column(
            10, "proofs", pa.array([[row.proofs] for row in good.rows], pa.list_(pa.list_(pa.binary())))
        ),
    }
    for name, other in tables.items():
        yield Case(name, _file(other, good.meta), False)
    for compression in ("gzip", "brotli", "lz4"):
        yield Case(f"compressed with {compression}", _file(table, good.meta, compression=compression), False)


def _bombs(good: RolloutUnit) -> Iterator[Case]:
    """Few bytes that unpack to very many, each by another way of saying things shortly."""
    meta, first = good.meta, good.rows[0]
    many = np.zeros(BOMB_VALUES, dtype=np.uint32)
    count = len(good.rows)

    def with_column(name: str, column: pa.Array) -> pa.Table:
        place = ROLLOUT_SCHEMA.get_field_index(name)
        return _table([first]).set_column(place, ROLLOUT_SCHEMA.field(name), column)

    def of_lists(name: str, values: pa.Array) -> pa.Table:
        offsets = pa.array([0, len(values)], pa.int32())
        kind = ROLLOUT_SCHEMA.field(name).type
        return with_column(name, pa.ListArray.from_arrays(offsets, values, type=kind))

    tokens, floats = pa.array(many), pa.array(many.astype(np.float32))
    yield Case("bomb: text", _file(with_column("environment", pa.array(["x" * 40_000_000])), meta), False)
    plain = {"use_dictionary": False}
    yield Case("bomb: packed zeros", _file(of_lists("prompt_tokens", tokens), meta, **plain), False)
    yield Case("bomb: runs of tokens", _file(of_lists("completion_tokens", tokens), meta), False)
    yield Case("bomb: runs of log-probs", _file(of_lists("logprobs", floats), meta), False)
    repeated = of_lists("proofs", pa.array([bytes(20_000)] * 10_000))
    yield Case("bomb: one proof, repeated", _file(repeated, meta), False)
    names = pa.array(["x" * 800_000] * count)
    wide = _table(good.rows).set_column(2, ROLLOUT_SCHEMA.field(2), names)
    yield Case("bomb: one name, repeated", _file(wide, meta), False)
    rows = pa.concat_tables([_table([first])] * 3000)
    yield Case("too many rows", _file(rows, meta), False)
    yield Case("too many row groups", _file(rows.slice(0, count), meta, row_group_size=1), None)


def _other_metadata(good: RolloutUnit) -> Iterator[Case]:
    table, meta = _table(good.rows), good.meta
    change = msgspec.structs.replace
    metas: dict[str, UnitMeta] = {
        "another format": change(meta, format=2),
        "another run": change(meta, run_id=bytes(32)),
        "another version": change(meta, version=meta.version + 1),
        "a version below zero": change(meta, version=-1),
        "another checkpoint": change(meta, checkpoint_hash=bytes(32)),
        "another node": change(meta, node=bytes(20)),
        "a node of no bytes": change(meta, node=b""),
        "another index": change(meta, index=2**31),
        "an engine with a very long name": change(meta, engine=EngineNote("x" * 100_000, "", "", "", "")),
    }
    for name, other in metas.items():
        yield Case(f"metadata: {name}", _file(table, other), False)
    for name, raw in {
        "none": None,
        "empty": b"",
        "not canonical": encode(meta) + b"\0",
        "of another shape": encode({"format": 1}),
        "nested without end": b"\x91" * 60_000,
    }.items():
        sink = io.BytesIO()
        metadata = None if raw is None else {b"intellect": raw}
        pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
        yield Case(f"metadata: {name}", sink.getvalue(), False)


def _bad_rows(row: Rollout) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    tokens = row.completion_tokens
    floats = np.float32
    for value in ("nan", "inf", "-inf"):
        yield f"a log-prob of {value}", False, {"logprobs": np.array([floats(value), *row.logprobs[1:]])}
        yield f"a reward of {value}", False, {"reward": float(value)}
    yield "no log-probs", False, {"logprobs": row.logprobs[:0]}
    yield "a log-prob too many", False, {"logprobs": np.append(row.logprobs, floats(-1))}
    yield (
        "tokens over every limit",
        False,
        {"completion_tokens": [3] * 300, "logprobs": np.zeros(300, floats)},
    )
    yield "a very long name", False, {"environment": "x" * 2000}
    yield "a reward that is not the task's", True, {"reward": 3e38}
    yield "another environment", True, {"environment": "arithmetic"}
    yield "an environment that does not exist", True, {"environment": "\u0000../../etc"}
    yield "another task", True, {"task_index": 2**64 - 1}
    yield "another target length", True, {"target_length": 2**32 - 1}
    yield "another prompt", True, {"prompt_tokens": [5, *row.prompt_tokens]}
    yield "no prompt", True, {"prompt_tokens": []}
    yield "a prompt number out of range", True, {"prompt": 2**32 - 1}
    yield "a sample number out of range", True, {"sample": 2**32 - 1}
    yield "no tokens", True, {"completion_tokens": [], "logprobs": row.logprobs[:0], "proofs": []}
    yield "a token far outside the vocabulary", True, {"completion_tokens": [2**32 - 1, *tokens[1:]]}
    yield "a token just outside the vocabulary", True, {"completion_tokens": [*tokens[:-1], 100]}
    longer = [3] * 40
    yield "more tokens than allowed", True, {"completion_tokens": longer, "logprobs": np.zeros(40, floats)}
    yield "tokens after the end", True, {"completion_tokens": [1, *tokens[1:]], "finish_reason": "stop"}
    short = {"completion_tokens": [3], "logprobs": row.logprobs[:1], "finish_reason": "length"}
    yield "an end before the end", True, short
    yield "another reason to finish", False, {"finish_reason": "\U0001f4a3"}
    yield "other tokens", True, {"completion_tokens": [(t + 1) % 90 + 3 for t in tokens[:-1]] + tokens[-1:]}


def _bad_orders(rows: list[Rollout]) -> Iterator[tuple[str, bool, list[Rollout]]]:
    yield "no rows", False, []
    yield "a row missing", False, rows[:-1]
    yield "one row only", False, rows[:1]
    yield "a row twice", True, [rows[0], *rows[:-1]]
    yield "rows in another order", True, rows[::-1]


def _bad_proofs(row: Rollout, other: Rollout) -> Iterator[tuple[str, list[bytes]]]:
    own = row.proofs
    words = np.frombuffer(own[0], dtype=">u2").copy()

    def forged(*values: int) -> list[bytes]:
        padded = np.zeros(1 + toploc.TOP_K, dtype=">u2")
        padded[: len(values)] = values
        return [padded.tobytes(), *own[1:]]

    def changed(change: Callable[[Any], None]) -> list[bytes]:
        copy = words.copy()
        change(copy)
        return [copy.tobytes(), *own[1:]]

    yield "none", []
    yield "one too many", [*own, own[0]]
    yield "very many", own * 8
    yield "empty", [b""] * len(own)
    yield "a byte short", [own[0][:-1], *own[1:]]
    yield "a byte long", [own[0] + b"\0", *own[1:]]
    yield "random", [random.Random(1).randbytes(toploc.PROOF_BYTES), *own[1:]]
    yield "modulus zero", forged(0, *words[1:])
    yield "modulus one", forged(1, *words[1:])
    yield "a small modulus", forged(60_000, *words[1:])
    yield "a large modulus", forged(65_535, *words[1:])
    yield "a coefficient over the prime", changed(lambda copy: copy.__setitem__(1, 65_497))
    yield "all zeros", forged(toploc.MAX_MODULUS)
    yield "a constant", forged(toploc.MAX_MODULUS, 0x3FC0)
    yield "one coefficient changed", changed(lambda copy: copy.__setitem__(5, (int(copy[5]) + 1) % 65_497))
    yield "little-endian", [np.frombuffer(own[0], "<u2").astype(">u2").tobytes(), *own[1:]]
    yield "another row's", [other.proofs[0], *own[1:]]
