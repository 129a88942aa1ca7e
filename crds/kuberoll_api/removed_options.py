"""Options that a command no longer has, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_KUBECONFIG: Final = "set the variable KUBECONFIG to the file, as for kubectl"

REMOVED: Final[Mapping[tuple[str, str], str]] = {
    ("apply", "--kubeconfig"): _KUBECONFIG,
    ("get", "--kubeconfig"): _KUBECONFIG,
    ("logs", "--kubeconfig"): _KUBECONFIG,
    ("top", "--kubeconfig"): _KUBECONFIG,
}
"""What to write instead, by the command without `kuberoll` and the option."""


def sentence(command: str, option: str) -> str | None:
    """Words about a removed option: its name, and what to write instead; None if it was not removed."""
    said = REMOVED.get((command, option))
    return None if said is None else f"{option} was removed: {said}"
