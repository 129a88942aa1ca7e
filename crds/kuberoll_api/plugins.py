"""Plug-ins: what distributions register under a group of entry points, those of KubeRoll like any other's."""

from __future__ import annotations

import importlib.metadata
from typing import Any

ENGINES = "kuberoll.engines"
"""Engines behind the Serve app (`kuberoll_workers.serving.engines.registry`), by name."""
PLAYERS = "kuberoll.players"
"""Ways of playing the trajectories of an environment (`kuberoll_workers.rollouts.player`), by name."""


class MissingPlugin(LookupError):
    """Nothing is registered under the name; the message has the names that are."""


def load(group: str, name: str) -> Any:
    """Load what is registered under a name.

    Raises:
        MissingPlugin: Nothing is.
        ImportError: It needs what is not installed.
    """
    registered = importlib.metadata.entry_points(group=group)
    if name not in registered.names:
        known = ", ".join(sorted(registered.names)) or "none"
        raise MissingPlugin(f"no installed package registers {name!r} under {group}; known ones are {known}")
    return registered[name].load()
