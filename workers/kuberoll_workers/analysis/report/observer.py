"""What a report needs of the trajectories themselves, collected in one pass over them."""

from __future__ import annotations

from kuberoll_workers.analysis.report.sandboxes import SandboxTimes
from kuberoll_workers.analysis.report.throughput import Throughput
from kuberoll_workers.analysis.report.trajectory_sample import TrajectorySample
from kuberoll_workers.analysis.report.versions import VersionCounts
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output.precedence import EndedRecord


class ReportObserver:
    """Collects a report's trajectories, throughput, policy versions and sandboxes.

    Attributes:
        sample: Trajectories to read.
        throughput, versions, sandboxes: Of the finished trajectories.
    """

    def __init__(self, sample: TrajectorySample | None = None) -> None:
        self.sample = TrajectorySample() if sample is None else sample
        self.throughput = Throughput()
        self.versions = VersionCounts()
        self.sandboxes = SandboxTimes()

    def offer(self, record: EndedRecord) -> None:
        """Add a trajectory."""
        self.sample.offer(record)
        if isinstance(record, TrajectoryRecord):
            self.throughput.add(record)
            self.versions.add(record)
            self.sandboxes.add(record)
