"""An environment without PyTorch, as in the worker image and where only KubeRoll's workers are installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def without_torch(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of a process that finds no PyTorch: Python imports `sitecustomize` at its start.

    Beside PyTorch transformers imports it, which takes longer than all else that a worker does to start.
    """
    before = environment.get("PYTHONPATH")
    path = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    return {**environment, "PYTHONPATH": path}
