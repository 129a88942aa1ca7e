"""Libraries that environments need, each in an extra of its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.environments.registry import UnusableEnvironment


@dataclass(frozen=True, slots=True)
class Library:
    """A library that environments of a type need.

    Attributes:
        package: Name of its package, as it is imported.
        extra: The extra of KubeRoll that installs it.
        distribution: Its name on PyPI.
    """

    package: str
    extra: str
    distribution: str

    def module(self, name: str | None = None) -> Any:
        """Import the package, or a module of it.

        Args:
            name: Name of the module below the package.

        Raises:
            UnusableEnvironment: It is not installed; the message names the extra.
        """
        if importlib.util.find_spec(self.package) is None:
            raise UnusableEnvironment(
                f"the package {self.package} is not installed: {self.command}; in a cluster, in the image of the "
                "workers"
            )
        return importlib.import_module(self.package if name is None else f"{self.package}.{name}")

    @property
    def command(self) -> str:
        """Command that installs it."""
        return f"pip install 'kuberoll[{self.extra}]'"

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
