"""Which driver makes the sandboxes of this process."""

from __future__ import annotations

import os
from typing import Final

from kuberoll_workers.data.places import state_directory
from kuberoll_workers.sandboxes.driver import Driver
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver

VARIABLE: Final = "KUBEROLL_SANDBOX_DRIVER"
"""Variable that names the driver: `namespaces`."""


def find_driver() -> Driver:
    """The driver of this process.

    Raises:
        SandboxUnavailable: The variable names none.
    """
    name = os.environ.get(VARIABLE, "namespaces")
    if name != "namespaces":
        raise SandboxUnavailable(f"{VARIABLE} is {name!r}; it must be namespaces")
    return NamespaceDriver(cache=state_directory() / "sandboxes")
