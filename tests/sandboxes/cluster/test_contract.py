"""The contract, by the pods of a real cluster."""

from __future__ import annotations

from tests.sandboxes.pod_contract import PodContract


class TestRealPods(PodContract):
    """The contract of pods."""

    ways_to_end = ("delete", "force", "evict")
