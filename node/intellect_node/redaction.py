"""Hiding what a public report must not show."""

from __future__ import annotations

import getpass
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intellect_protocol.run import RunConfig


def redact(text: str, run: RunConfig | None) -> str:
    """`text` for a public report: without home directory, user name, and addresses of machine and account."""
    text = text.replace(str(Path.home()), "~")
    if run is not None:
        known = {address.lower() for address in run.terms.ledger.contracts.values()}
        known |= {run.terms.keys.coordinator.lower(), run.terms.keys.publisher.lower()}
    else:
        known = set()

    def hide(match: re.Match[str]) -> str:
        return match[0] if match[0].lower() in known else f"{match[0][:6]}...(hidden)"

    text = re.sub(r"0x[0-9a-fA-F]{40}", hide, text)
    text = re.sub(r"(?<=://)[^/\s@]+@", "(hidden)@", text)
    text = re.sub(r"\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}\b", "(hidden)", text)
    user = getpass.getuser()
    return re.sub(rf"\b{re.escape(user)}\b", "(user)", text) if len(user) > 2 else text
