"""The engines that jobs can name in `spec.generation.engine`: each is a plug-in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from kuberoll_api import plugins
from kuberoll_api.contract import ServeArgs
from kuberoll_workers.serving.engines.interface import Engine


class EngineKind(Protocol):
    """An engine that jobs can name."""

    def make(self, args: ServeArgs) -> Engine:
        """Create the engine with these arguments; it is not started."""

    def missing(self) -> str | None:
        """A message about the package that the engine lacks on this machine, and how to install it; None: none."""

    def on_gpus(self) -> bool:
        """True if the engine, as installed on this machine, computes on GPUs."""

    def world_size(self, engine_args: Mapping[str, Any]) -> int:
        """Number of devices that one replica with these arguments uses."""


def engine_kind(name: str) -> EngineKind:
    """Find an engine by its name.

    Raises:
        MissingPlugin: No installed package registers it.
    """
    return cast("EngineKind", plugins.load(plugins.ENGINES, name))


def world_size(engine_args: Mapping[str, Any]) -> int:
    """Number of devices that one engine with these arguments of vLLM uses."""
    return int(engine_args.get("tensor_parallel_size", 1)) * int(engine_args.get("pipeline_parallel_size", 1))
