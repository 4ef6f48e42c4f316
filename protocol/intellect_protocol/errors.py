"""Every error this project raises on purpose, and the exit code each one ends a program with.

    IntellectError                    1  unexpected
    ├── UsageError                    2  wrong usage of a command
    │   └── ConfigError               2  a configuration file or value is wrong
    ├── PreflightError                3  this machine cannot do the job as asked
    ├── UnreachableError              4  a peer, the coordinator or the chain did not answer: retry later
    │   └── DeadlineError             4  ... within its deadline
    ├── WalletError                   5  wallet, keystore, password or node key
    │   ├── BindingError              5  a node key that belongs to another wallet or peer
    │   └── HistoryError              5  a node key's signed history forbids this answer
    ├── RefusedError                  6  the other side understood and said no
    │   └── SlashedError              6  ... because the stake was seized or the node is barred
    ├── UpgradeRequiredError         10  the run needs a newer protocol version
    ├── EngineError                   1  an engine failed at a piece of work
    │   └── NumericError              1  ... because a logit or log-prob is not finite
    └── InvalidDataError              1  bytes from outside do not have the agreed form
        ├── WireError                 1  a frame or message
        ├── ManifestError             1  a checkpoint manifest, chunk or patch
        ├── RolloutFileError          1  a rollout or batch file
        ├── ProofError                1  a TOPLOC proof that does not parse
        └── LedgerError               1  a reverted transaction or a malformed chain answer

Every message is one line, written for the person who reads it in a terminal.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_UNREACHABLE = 4
EXIT_KEY = 5
EXIT_REFUSED = 6
EXIT_UPGRADE = 10
EXIT_INTERRUPTED = 130


class IntellectError(Exception):
    """Base of all errors raised on purpose; `exit_code` is the process exit status."""

    exit_code = EXIT_UNEXPECTED


class UsageError(IntellectError):
    """A command was used in a way that cannot work."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A configuration file or value is wrong; the text names the file, the key and the line."""


class PreflightError(IntellectError):
    """This machine lacks something the job needs (memory, disk, device, port)."""

    exit_code = EXIT_PREFLIGHT


class UnreachableError(IntellectError):
    """Nobody answered; trying later may work."""

    exit_code = EXIT_UNREACHABLE


class DeadlineError(UnreachableError):
    """The answer did not arrive within the deadline."""


class WalletError(IntellectError):
    """Something is wrong with a wallet, keystore, password or node key."""

    exit_code = EXIT_KEY


class BindingError(WalletError):
    """A node key, wallet and peer id that do not belong together."""


class HistoryError(WalletError):
    """The signed history of a node key forbids an answer, or belongs to another key or run."""


class RefusedError(IntellectError):
    """The other side refused.

    Attributes:
        code: machine-readable reason, e.g. ``stale_version``.
        retry_after_s: seconds after which the same request may succeed, or None if it never will.
    """

    exit_code = EXIT_REFUSED

    def __init__(self, code: str, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.retry_after_s = retry_after_s


class SlashedError(RefusedError):
    """The owner's stake was seized or its nodes are barred from the run."""


class UpgradeRequiredError(IntellectError):
    """The run needs a newer protocol version than this program speaks."""

    exit_code = EXIT_UPGRADE


class EngineError(IntellectError):
    """An engine failed; the work it had is unfinished and can be handed back.

    Attributes:
        reason: ``stalled``, ``out-of-memory``, ``killed``, ``crashed``, ``numeric``, ``probe`` or
            ``protocol``.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class NumericError(EngineError):
    """A logit or log-prob is NaN or infinite."""

    def __init__(self, text: str) -> None:
        super().__init__("numeric", text)


class InvalidDataError(IntellectError):
    """Bytes from outside do not have the agreed form."""


class WireError(InvalidDataError):
    """A frame or message is malformed, oversize or truncated."""


class ManifestError(InvalidDataError):
    """A manifest, chunk or patch does not verify."""


class RolloutFileError(InvalidDataError):
    """A rollout or batch file does not have the agreed schema or exceeds a limit."""


class ProofError(InvalidDataError):
    """A TOPLOC proof does not parse."""


class LedgerError(InvalidDataError):
    """A transaction reverted or the chain answered something malformed.

    Attributes:
        name: the contract's custom error name where it could be decoded, else "".
    """

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name
