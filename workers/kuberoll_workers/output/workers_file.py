"""The file by which a trainer on the same machine finds the workers of a run whose output is an object store."""

from __future__ import annotations

from typing import Final

import msgspec

WORKERS_FILE: Final = "workers.json"
"""Name of the file in the run's local directory, where its logs are."""


class WorkersFile(msgspec.Struct, kw_only=True, frozen=True):
    """Content of the file, as JSON.

    Attributes:
        addresses: `host:port` of each worker.
        tokens: Path of a file with the workers' tokens by scope, which only the user of the run can read.
    """

    addresses: list[str]
    tokens: str
