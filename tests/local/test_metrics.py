"""Several worker processes behind one `/metrics`."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kuberoll_workers.local.metrics import serve_metrics

WORKER = """
import sys
from kuberoll_workers.telemetry import TrajectoryCounts, RolloutMetrics

number = int(sys.argv[1])
metrics = RolloutMetrics("job")
metrics.read_counts = lambda: TrajectoryCounts(planned=10 + number, stored=number, abandoned=1)
environment = metrics.environment("env")
environment.set_step_timeout(30.0)
environment.record_turn(1, waiting_seconds=0.1, generation_seconds=2.0, environment_seconds=0.3, observed=5)
environment.record_finish(stop_reason="terminated", reward=1.0, turns=1, seconds=2.4)
metrics.flush()
metrics.flush()
"""


def test_they_are_shown_together(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(number)], env=environment) for number in (1, 2)]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    with serve_metrics(tmp_path, 0) as port:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240).read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {(one.name, one.labels.get("le")): one.value for family in families.values() for one in family.samples}
    # No worker counts the part of another.
    assert values["kuberoll_trajectories_planned", None] == 11 + 12
    assert values["kuberoll_trajectories_stored", None] == 1 + 2
    assert values["kuberoll_trajectories_abandoned", None] == 2
    # One limit, however many workers know it.
    assert values["kuberoll_environment_timeout_seconds", None] == 30
    assert values["kuberoll_turn_waiting_seconds_count", None] == 2
    assert values["kuberoll_turn_waiting_seconds_sum", None] == 0.2
    assert values["kuberoll_turn_waiting_seconds_bucket", "0.1"] == 2
    assert families["kuberoll_turn_waiting_seconds"].documentation.startswith("Wall seconds of a turn outside")
