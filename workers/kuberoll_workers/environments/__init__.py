"""Environments: interface, registry, isolation, and the built-in ones.

The names are imported when they are first used: keepers and launchers are processes that need only small modules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kuberoll_workers.environments.interface import (
        EnvironmentInterface,
        EnvironmentReturn,
        Episode,
        EpisodeEnd,
        EpisodeStart,
        GroupMember,
        GroupScore,
        ScoringCase,
        Unavailable,
        UnusableRow,
    )
    from kuberoll_workers.environments.registry import BUILT_INS, LIBRARIES, UnusableEnvironment, create, resolve
    from kuberoll_workers.environments.served_models import ServedModel, policy_endpoint, service_endpoint
    from kuberoll_workers.environments.tools import ToolEnvironment, ToolError, tool

__all__ = [
    "BUILT_INS",
    "LIBRARIES",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "Episode",
    "EpisodeEnd",
    "EpisodeStart",
    "GroupMember",
    "GroupScore",
    "ScoringCase",
    "ServedModel",
    "ToolEnvironment",
    "ToolError",
    "Unavailable",
    "UnusableEnvironment",
    "UnusableRow",
    "create",
    "policy_endpoint",
    "resolve",
    "service_endpoint",
    "tool",
]

_PLACES = {
    **dict.fromkeys(("BUILT_INS", "LIBRARIES", "UnusableEnvironment", "create", "resolve"), "registry"),
    **dict.fromkeys(("ServedModel", "policy_endpoint", "service_endpoint"), "served_models"),
    **dict.fromkeys(("ToolEnvironment", "ToolError", "tool"), "tools"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES.get(name, 'interface')}"), name)
