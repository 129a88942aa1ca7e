"""Plug-ins: what distributions register under a group of entry points, those of KubeRoll like any other's."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any

CHECKS = "kuberoll.checks"
"""Checks that come with an extra: `dataset`, of `kuberoll validate --dataset`."""
COMMANDS = "kuberoll.commands"
"""Subcommands of `kuberoll`: `kuberoll_<extra>.module:command`, or `package.module:command [extra]`."""
DATASETS = "kuberoll.datasets"
"""Forms of datasets in directories (`kuberoll_workers.dataset.forms`), by name."""
ENDINGS = "kuberoll.endings"
"""What is made of a run at its end (`kuberoll_workers.analysis.endings`), by name."""
ENGINES = "kuberoll.engines"
"""Engines behind the Serve app (`kuberoll_workers.serving.engines.registry`), by name."""
ENVIRONMENTS = "kuberoll.environments"
"""Classes of environments, by the `type` of the manifest."""
EXPORTS = "kuberoll.exports"
"""Formats of `kuberoll export` (`kuberoll_workers.analysis.export.formats`), by name."""
ISOLATIONS = "kuberoll.isolations"
"""Places of environments that are no process of a worker (`kuberoll_workers.environments.isolation`): `Remote`."""
PLAYERS = "kuberoll.players"
"""Ways of playing the trajectories of an environment (`kuberoll_workers.rollouts.player`), by name."""

POLICIES = "kuberoll.policies"
"""Clients of policies that KubeRoll does not serve (`kuberoll_workers.policy.external`): `External`."""

_OURS = ("kuberoll.", "kuberoll_")


class MissingPlugin(LookupError):
    """Nothing is registered under the name; the message has the names that are."""


def installed(group: str) -> Mapping[str, EntryPoint]:
    """What is registered, by name, sorted; of two with one name KubeRoll's, else that of the first distribution."""
    return _found(group, tuple(sys.path))


@functools.cache
def _found(group: str, _path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Read the metadata of all distributions, which takes tens of milliseconds, once for a search path."""

    def precedence(entry: EntryPoint) -> tuple[bool, str]:
        return not entry.module.startswith(_OURS), entry.dist.name if entry.dist else ""

    # The last one of a name stays.
    found = sorted(importlib.metadata.entry_points(group=group), key=precedence, reverse=True)
    return MappingProxyType(dict(sorted({entry.name: entry for entry in found}.items())))


def find(group: str, name: str) -> EntryPoint | None:
    """What is registered under a name, as in `installed`; None if nothing is."""
    # All processes of environments look one up; the metadata of all distributions take long to read.
    return _own(tuple(sys.path)).get((group, name)) or installed(group).get(name)


@functools.cache
def _own(_path: tuple[str, ...]) -> Mapping[tuple[str, str], EntryPoint]:
    """What KubeRoll itself registers, by group and name."""
    try:
        entries = importlib.metadata.distribution("kuberoll").entry_points
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {(entry.group, entry.name): entry for entry in entries if entry.module.startswith(_OURS)}


def load(group: str, name: str) -> Any:
    """Load what is registered under a name.

    Raises:
        MissingPlugin: Nothing is.
        ImportError: It needs what is not installed.
    """
    if (found := find(group, name)) is None:
        raise MissingPlugin(absence(group, name))
    return found.load()


def absence(group: str, name: str) -> str:
    """Say that nothing is registered under a name, what is, and what to do."""
    known = ", ".join(installed(group)) or "none"
    return (
        f"no installed package registers {name!r} under {group}; known ones are {known}. In a checkout, install "
        "KubeRoll again when pyproject.toml has changed"
    )
