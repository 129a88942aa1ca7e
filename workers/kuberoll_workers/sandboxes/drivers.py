"""Which driver makes the sandboxes of this process."""

from __future__ import annotations

import importlib.util
import os
from typing import Final

from kuberoll_workers.data.places import state_directory
from kuberoll_workers.sandboxes.containers.driver import DockerDriver
from kuberoll_workers.sandboxes.containers.engine import has_engine
from kuberoll_workers.sandboxes.driver import Driver
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver

VARIABLE: Final = "KUBEROLL_SANDBOX_DRIVER"
"""Variable that names the driver, `docker` or `namespaces`; unset: Docker or Podman where one answers and Docker's SDK
is installed."""


def find_driver() -> Driver:
    """The driver of this process.

    Raises:
        SandboxUnavailable: The variable names none.
    """
    name = os.environ.get(VARIABLE) or _usual()
    cache = state_directory() / "sandboxes"
    if name == "namespaces":
        return NamespaceDriver(cache=cache)
    if name == "docker":
        return DockerDriver(cache=cache)
    raise SandboxUnavailable(f"{VARIABLE} is {name!r}; it must be docker or namespaces")


def _usual() -> str:
    usable = importlib.util.find_spec("docker") is not None and has_engine(os.environ)
    return "docker" if usable else "namespaces"
