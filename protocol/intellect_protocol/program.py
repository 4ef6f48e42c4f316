"""What the command lines of all roles share: one-line errors, exit codes, ending on signals.

Imports nothing heavy: this is loaded before the command line is parsed.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NoReturn

from . import errors
from .errors import IntellectError

if TYPE_CHECKING:
    import typer

EXIT_CODES = (
    "Exit codes: 0 ok, 1 unexpected, 2 usage or configuration, 3 preflight failed, 4 unreachable (retry "
    "later), 5 wallet or key, 6 refused or slashed, 10 upgrade required, 130 interrupted."
)
_DEBUG = "INTELLECT_DEBUG"


def run_program(app: typer.Typer, name: str) -> NoReturn:
    """Run a command line and end the process with the exit code of what happened.

    Errors are one line on stderr. `--debug` anywhere on the command line, or INTELLECT_DEBUG=1, shows the
    traceback as well.
    """
    import typer

    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or os.environ.get(_DEBUG, "0") not in ("", "0")
    try:
        result = typer.main.get_command(app).main(args=arguments, prog_name=name, standalone_mode=False)
        code = result if isinstance(result, int) else errors.EXIT_OK
    except BaseException as error:
        code = _report(single_cause(error), name, debug)
    sys.stdout.flush()
    sys.exit(code)


def _report(error: BaseException, name: str, debug: bool) -> int:
    """Say what went wrong, in one line; the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else errors.EXIT_UNEXPECTED
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        print(f"{name}: interrupted", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # what the parser raises
        if text := error.format_message():  # empty where help was shown instead
            print(f"{name}: {text} (see --help)", file=sys.stderr)
        return errors.EXIT_USAGE
    if debug:
        traceback.print_exception(error)
    if isinstance(error, IntellectError):
        print(f"{name}: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    hint = "" if debug else " (--debug shows where)"
    print(f"{name}: unexpected {type(error).__name__}: {_one_line(error)}{hint}", file=sys.stderr)
    return errors.EXIT_UNEXPECTED


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def single_cause(error: BaseException) -> BaseException:
    """The error to show for a group of them: ours before others, then the one with the highest code."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves: list[BaseException] = []

    def collect(group: BaseExceptionGroup[BaseException]) -> None:
        for inner in group.exceptions:
            if isinstance(inner, BaseExceptionGroup):
                collect(inner)
            elif type(inner).__name__ != "Cancelled":
                leaves.append(inner)

    collect(error)
    ours = [leaf for leaf in leaves if isinstance(leaf, IntellectError)]
    if ours:
        return max(ours, key=lambda leaf: leaf.exit_code)
    return leaves[0] if leaves else error


def run_until_signal(main: Callable[[], Awaitable[None]]) -> int:
    """Run `main` under trio until it returns, or until SIGINT or SIGTERM cancel it.

    Returns:
        Exit code: 130 after SIGINT, 0 otherwise (SIGTERM is how a supervisor asks for a clean end).
    """
    import trio

    async def supervised() -> int:
        received: list[int] = []
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:

                async def listen() -> None:
                    async for number in signals:
                        received.append(number)
                        nursery.cancel_scope.cancel()

                nursery.start_soon(listen)
                await main()
                nursery.cancel_scope.cancel()
        return errors.EXIT_INTERRUPTED if signal.SIGINT in received else errors.EXIT_OK

    return trio.run(supervised)
