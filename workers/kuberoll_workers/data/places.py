"""Directories of KubeRoll's own on a machine."""

from __future__ import annotations

import os
from pathlib import Path


def state_directory() -> Path:
    """Directory of what outlives a command, tokens among it: `kuberoll` in `$XDG_STATE_HOME`, or `~/.local/state`."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "kuberoll"
