"""The plug-in of the simulated engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kuberoll_api.contract import ServeArgs
from kuberoll_workers.serving.engines.interface import Engine
from kuberoll_workers.serving.engines.registry import world_size
from kuberoll_workers.serving.engines.simulated import Simulated


class SimulatedKind:
    """A simulation of an engine's latency."""

    def make(self, args: ServeArgs) -> Engine:
        return Simulated.of(args)

    def missing(self) -> str | None:
        return None

    def on_gpus(self) -> bool:
        return False

    def world_size(self, engine_args: Mapping[str, Any]) -> int:
        # It takes vLLM's arguments.
        return world_size(engine_args)


SIMULATED = SimulatedKind()
