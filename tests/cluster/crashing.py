"""An environment that ends its whole process, as a fault in native code does."""

from __future__ import annotations

import os
from typing import Any

from kuberoll_workers.environments.interface import EnvironmentInterface, EnvironmentReturn

EXIT_CODE = 9


class Crashing(EnvironmentInterface[Any]):
    """Ends the process at its first step."""

    def __init__(self, config: Any = None) -> None:
        del config

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        os._exit(EXIT_CODE)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}
