"""What parent and engine child say to each other: length-prefixed msgpack frames on two pipes.

The parent sends one operation at a time; requests and rows follow it one per frame, so that no
frame grows with the size of a unit. The child answers with any number of results and progress
reports and ends with `Done` or `Failed`. Both sides bound every frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from ..errors import (
    ConfigError,
    EngineError,
    IntellectError,
    NumericError,
    PreflightError,
    UsageError,
    WireError,
)
from ..wire import frame, frame_length
from .base import Completion, EngineInfo, GenerateRequest, RowScore, Sampling, ScoreRow

T = TypeVar("T")

MAX_FRAME_BYTES = 16 << 20
OUT_OF_MEMORY = "out-of-memory"
CANCELLED = "cancelled"


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all frames; the tag is the class name."""


# --- parent to child -----------------------------------------------------------------------------


class Start(_Frame, frozen=True):
    """First frame: which engine to make; answered by `Done` or `Failed`."""

    engine: str
    device: str
    dtype: str
    max_rows: int
    threads: int
    attention: str


class Load(_Frame, frozen=True):
    """Load a checkpoint folder; answered by `Loaded`."""

    checkpoint_dir: str


class Update(_Frame, frozen=True):
    """Swap in another version; answered by `Loaded`."""

    checkpoint_dir: str


class Probe(_Frame, frozen=True):
    """Answered by `Probed`."""

    prompt: list[int]


class Generate(_Frame, frozen=True):
    """`count` frames `Request` follow; answered by `Sampled` for every seed, then `Done`."""

    sampling: Sampling
    count: int


class Request(_Frame, frozen=True):
    """One request of a `Generate`."""

    request: GenerateRequest


class Score(_Frame, frozen=True):
    """`count` frames `Row` follow; answered by `Scored` for every row, then `Done`."""

    sampling: Sampling
    secret: bytes
    count: int


class Row(_Frame, frozen=True):
    """One row of a `Score`."""

    row: ScoreRow


class Unload(_Frame, frozen=True):
    """Free the policy; answered by `Done`."""


class Cancel(_Frame, frozen=True):
    """End the running operation soon; answered by `Failed` of kind "cancelled", or by its own end."""


# --- child to parent -----------------------------------------------------------------------------


class Loaded(_Frame, frozen=True):
    """A policy is in place."""

    info: EngineInfo


class Probed(_Frame, frozen=True):
    """Log-probs of a probe."""

    logprobs: list[float]


class Sampled(_Frame, frozen=True):
    """One completion."""

    request: int
    sample: int
    completion: Completion


class Scored(_Frame, frozen=True):
    """One row's score."""

    row: int
    score: RowScore


class Progress(_Frame, frozen=True):
    """Tokens computed since the operation began; sent only when there are more than before."""

    tokens: int


class Done(_Frame, frozen=True):
    """The operation is complete."""


class Failed(_Frame, frozen=True):
    """The operation failed; `kind` is an error class's name, "out-of-memory" or "cancelled"."""

    kind: str
    text: str


ItemT = TypeVar("ItemT", Request, Row)
ToChild = Start | Load | Update | Probe | Generate | Request | Score | Row | Unload | Cancel
FromChild = Loaded | Probed | Sampled | Scored | Progress | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_to_child = msgspec.msgpack.Decoder(ToChild)
_from_child = msgspec.msgpack.Decoder(FromChild)

_ERRORS: dict[str, Callable[[str], IntellectError]] = {
    "ConfigError": ConfigError,
    "PreflightError": PreflightError,
    "UsageError": UsageError,
    "NumericError": NumericError,
    OUT_OF_MEMORY: lambda text: EngineError(OUT_OF_MEMORY, f"out of memory: {text}"),
}


def pack(message: ToChild | FromChild) -> bytes:
    """The frame of a message.

    Raises:
        WireError: longer than `MAX_FRAME_BYTES`.
    """
    return frame(_encoder.encode(message), max_bytes=MAX_FRAME_BYTES)


def length_of(prefix: bytes) -> int:
    """Length announced by a 4-byte prefix.

    Raises:
        WireError: over the limit.
    """
    return frame_length(prefix, max_bytes=MAX_FRAME_BYTES)


def unpack_to_child(payload: bytes) -> ToChild:
    """Decode a frame from the parent; WireError if it is malformed."""
    return _decode(_to_child, payload)


def unpack_from_child(payload: bytes) -> FromChild:
    """Decode a frame from the child; WireError if it is malformed."""
    return _decode(_from_child, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"malformed engine frame: {error}") from error


def error_of(failed: Failed) -> IntellectError:
    """The exception that a `Failed` stands for; an unknown kind is a crash of the engine's code."""
    make = _ERRORS.get(failed.kind)
    return make(failed.text) if make else EngineError("crashed", f"crashed: {failed.kind}: {failed.text}")
