"""What sandboxes count of themselves; `kuberoll_workers.telemetry.definitions` says what each number is."""

from __future__ import annotations

from typing import Final

from kuberoll_workers.telemetry import Meters
from kuberoll_workers.telemetry import definitions as metrics

STARTED: Final = "started"
REMOVED: Final = "removed"
FAILED: Final = "failed"
USED: Final = "used"
UNUSED: Final = "unused"


def sandbox_meters() -> Meters:
    """Meters of the sandboxes of one environment."""
    return Meters([
        (metrics.SANDBOXES_IN_USE, ()),
        (metrics.SANDBOXES_WAITING, ()),
        (metrics.SANDBOX_STARTS, (STARTED,)),
        (metrics.SANDBOX_STARTS, (FAILED,)),
        (metrics.SANDBOX_START_SECONDS, ()),
        (metrics.SANDBOXES_AHEAD, ()),
        (metrics.SANDBOXES_PREPARED, (USED,)),
        (metrics.SANDBOXES_PREPARED, (UNUSED,)),
        (metrics.SANDBOXES_PREPARED, (FAILED,)),
        (metrics.SANDBOX_WAIT_SECONDS, ()),
        (metrics.SANDBOXES_LOST, ()),
        (metrics.GRADER_INPUTS_CHANGED, ()),
        (metrics.SANDBOX_REMOVALS, (REMOVED,)),
        (metrics.SANDBOX_REMOVALS, (FAILED,)),
        (metrics.SANDBOXES_LEFT, ()),
    ])  # fmt: skip
