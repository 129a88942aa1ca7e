"""Which driver makes the sandboxes of this process."""

from __future__ import annotations

import importlib.util
import os
from typing import Final

from kuberoll_api.sandboxes import DRIVER_VARIABLE, PODS
from kuberoll_workers.data.places import state_directory
from kuberoll_workers.sandboxes.containers.driver import DockerDriver
from kuberoll_workers.sandboxes.containers.engine import has_engine
from kuberoll_workers.sandboxes.driver import Driver
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.leases import Sandboxes
from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver
from kuberoll_workers.sandboxes.pods.driver import PodDriver

VARIABLE: Final = DRIVER_VARIABLE
"""Variable that names the driver, `docker`, `namespaces` or `pods`, as in workers of a cluster; unset: Docker or Podman
where one answers and Docker's SDK is installed."""


_PODS_AT_ONCE: Final = 1024


def find_sandboxes(environment: str) -> Sandboxes:
    """Sandboxes of this process's driver.

    Args:
        environment: Name of the environment that they are for; empty: none of a job.

    Raises:
        SandboxUnavailable: The variable names no driver.
    """
    driver = find_driver(environment)
    # The broker limits how many pods start at a time.
    return Sandboxes(driver, parallel_starts=_PODS_AT_ONCE) if isinstance(driver, PodDriver) else Sandboxes(driver)


def find_driver(environment: str) -> Driver:
    """The driver of this process.

    Args:
        environment: Name of the environment that the sandboxes are for; empty: none of a job.

    Raises:
        SandboxUnavailable: The variable names none.
    """
    name = os.environ.get(VARIABLE) or _usual()
    cache = state_directory() / "sandboxes"
    if name == "namespaces":
        return NamespaceDriver(cache=cache)
    if name == "docker":
        return DockerDriver(cache=cache)
    if name == PODS:
        return PodDriver(environment=environment)
    raise SandboxUnavailable(f"{VARIABLE} is {name!r}; it must be docker, namespaces or pods")


def _usual() -> str:
    usable = importlib.util.find_spec("docker") is not None and has_engine(os.environ)
    return "docker" if usable else "namespaces"
