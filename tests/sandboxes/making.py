"""Drivers of tests, which other processes make, too."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import sys
from dataclasses import dataclass, field
from typing import Any

from kuberoll_workers.sandboxes.driver import Driver, SandboxSpec


@dataclass(frozen=True, slots=True)
class Making:
    """How a driver is made.

    Attributes:
        entrypoint: `module:class`.
        arguments: Of the class; they can be pickled.
    """

    entrypoint: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Driver:
        """Make one."""
        module, _, name = self.entrypoint.partition(":")
        driver: Driver = getattr(importlib.import_module(module), name)(**self.arguments)
        return driver


async def hold(making: Making, name: str, spec: SandboxSpec) -> None:
    """Have a sandbox until somebody ends this process; says so when it is there."""
    driver = making.make()
    await driver.create(name, spec)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(hold(*pickle.loads(sys.stdin.buffer.read())))
