"""What a person sees of a devnet: a live terminal view, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .snapshot import NodeRow, Snapshot

_BARS = "▁▂▃▄▅▆▇█"
_EVENTS_SHOWN = 9
_SPARK_WIDTH = 60


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH, low: float = 0.0, high: float = 1.0) -> str:
    """Values as block characters; longer series are averaged down to `width` columns."""
    if not values:
        return ""
    columns = min(width, len(values))
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    span = max(high - low, 1e-9)
    return "".join(_BARS[max(0, min(7, int(8 * (value - low) / span)))] for value in means)


def format_bytes(count: float) -> str:
    """A byte count with a unit a person reads at a glance."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


class EventLog:
    """The last events, in plain words, each told once."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self.lines: deque[str] = deque(maxlen=200)

    def tell(self, text: str, at_s: float | None = None) -> None:
        """Add one event; without a terminal it is printed at once."""
        line = f"{time.strftime('%H:%M:%S', time.localtime(at_s))} {text}"
        self.lines.append(line)
        if self._console is not None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def render(snapshot: Snapshot, events: EventLog) -> RenderableType:
    """The whole live view."""
    return Group(_training_panel(snapshot), _node_table(snapshot.nodes), _event_panel(events))


def _training_panel(snapshot: Snapshot) -> Panel:
    history = snapshot.reward_history
    text = Text()
    text.append(f"policy version {snapshot.version}", style="bold")
    text.append(f"   step {snapshot.step}   {snapshot.seconds:.0f} s since the first step\n")
    text.append("reward   ")
    text.append(sparkline(history), style="green")
    if history:
        text.append(f"  {history[-1]:.2f}")
    text.append("\nheld-out ")
    text.append(
        " → ".join(f"{score:.2f}" for _, score in snapshot.heldout[-8:]) or "not measured yet", style="cyan"
    )
    text.append(
        f"\nsubmissions  {snapshot.accepted} accepted  {snapshot.rejected} rejected"
        f"   trainer idle {100 * snapshot.idle_share:.0f} %"
        f"   weights {format_bytes(snapshot.bytes_from_origin)} from the origin, "
        f"{format_bytes(snapshot.bytes_from_peers)} from peers"
    )
    return Panel(text, title=f"{snapshot.run_name}  (development chain: keys are public)", title_align="left")


def _node_table(nodes: Sequence[NodeRow]) -> Table:
    table = Table(expand=True)
    for name in ("node", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("policy", "accepted", "refused", "stake", "from origin", "from peers"):
        table.add_column(name, justify="right", no_wrap=True)
    for node in nodes:
        style = "red" if node.slashed else ("yellow" if node.cheat else "")
        table.add_row(
            node.name,
            node.state,
            str(node.version) if node.version >= 0 else "-",
            str(node.accepted),
            str(node.rejected),
            "-" if node.stake is None else f"{node.stake:g}",
            format_bytes(node.bytes_from_origin),
            format_bytes(node.bytes_from_peers),
            style=style,
        )
    return table


def _event_panel(events: EventLog) -> Panel:
    lines = list(events.lines)[-_EVENTS_SHOWN:]
    return Panel(
        Text("\n".join(lines), overflow="ellipsis", no_wrap=True), title="events", title_align="left"
    )


def plain_line(snapshot: Snapshot) -> str:
    """One progress line, for a log without a terminal."""
    reward = f"{snapshot.reward_history[-1]:.2f}" if snapshot.reward_history else "-"
    heldout = f"{snapshot.heldout[-1][1]:.2f}" if snapshot.heldout else "-"
    return (
        f"version {snapshot.version}  step {snapshot.step}  reward {reward}  held-out {heldout}  "
        f"accepted {snapshot.accepted}  rejected {snapshot.rejected}  "
        f"from peers {format_bytes(snapshot.bytes_from_peers)}"
    )
