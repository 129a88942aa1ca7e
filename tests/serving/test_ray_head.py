"""What a real Ray starts for a host."""

from __future__ import annotations

from pathlib import PurePath

import psutil
import pytest

from tests.serving.conftest import ServingHost

pytestmark = pytest.mark.ray


def test_ray_starts_no_processes_for_clusters_and_dashboards(simulated_host: ServingHost) -> None:
    programs: list[str] = []
    for process in psutil.Process(simulated_host.host.process.pid).children(recursive=True):
        programs += [PurePath(argument).name for argument in process.cmdline()]
    # The last two are Ray's own, without which it does not run.
    assert [name in programs for name in ("dashboard.py", "monitor.py", "log_monitor.py", "raylet")] == [
        False,
        False,
        True,
        True,
    ]
