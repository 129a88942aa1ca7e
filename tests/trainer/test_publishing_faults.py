"""Any sequence of publications and faults: each replica has exactly one version, and the publisher tells the truth."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kuberoll.trainer import Deltas, Publisher, PublishFailed
from kuberoll_workers.data.weights.manifest import CHANGES_FILE, MODEL_FILE, directory_name
from tests.trainer.policies import Policy
from tests.trainer.test_publishing import bits, damage, weights

FAULTS = (
    "none",
    "refuses",
    "machine lost",
    "copy damaged",
    "changes damaged",
    "version removed",
    "trainer restarted",
    "replica replaced",
)


class Training:
    """A trainer and a policy, to which things happen.

    Attributes:
        version: Published last, or tried to be.
    """

    def __init__(self, policy: Policy, place: Path, anchor_every: int) -> None:
        self._policy, self._place, self._every = policy, place, anchor_every
        self._machines = 0
        self._publisher = self._started()
        self.version = 0

    def _started(self) -> Publisher:
        transport = Deltas(anchor_every=self._every)
        return Publisher(
            endpoint=self._policy.endpoint, location=self._place / "w", transport=transport, timeout=60, patience=0.3
        )

    def happens(self, fault: str) -> None:
        two = self._policy.replicas["two"].engine
        newest = self._place / "w" / directory_name(self.version)
        if fault == "refuses":
            two.refuses = {str(self.version + 1)}
        elif fault == "machine lost":
            self._machines += 1
            two.scratch = self._place / f"machine-{self._machines}"
        elif fault == "copy damaged" and two.fetched and self._place / "w" not in two.fetched[-1].parents:
            if (file := two.fetched[-1] / MODEL_FILE).exists():
                damage(file)
        elif fault == "changes damaged" and (newest / CHANGES_FILE).exists():
            damage(newest / CHANGES_FILE)
        elif fault == "version removed":
            shutil.rmtree(newest, ignore_errors=True)
        elif fault == "trainer restarted":
            self._publisher = self._started()

    def publish(self) -> None:
        """Publish the next version, and check what the replicas have."""
        self.version += 1
        try:
            self._publisher.publish(weights(self.version, 400), version=self.version)
        except PublishFailed as error:
            told: dict[str, Any] = {} if error.served is None else dict(error.served.replicas)
        else:
            told = dict.fromkeys(self._policy.replicas, str(self.version))
        for name, replica in self._policy.replicas.items():
            assert replica.served == told[name]
            # Of no version does it have a part.
            if (number := int(replica.served)) > 0:
                assert replica.engine.values == bits(number, 400)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=15)
@given(st.lists(st.sampled_from(FAULTS), min_size=1, max_size=8), st.integers(1, 5))
def test_a_replica_has_one_version_whatever_happens(faults: list[str], anchor_every: int) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        Policy(Path(directory) / "replicas").serving("one", "two") as policy,
    ):
        training = Training(policy, Path(directory), anchor_every)
        for fault in faults:
            if fault == "replica replaced" and training.version:
                policy.remove("one")
                # It may find nothing that is whole; then it does not start.
                policy.add("one")
            training.happens(fault)
            training.publish()
        # In the end all is well again.
        training.happens("trainer restarted")
        training.publish()
        assert {replica.served for replica in policy.replicas.values()} == {str(training.version)}
