"""Metrics of an engine's checks of responses, on Ray's metrics endpoint beside vLLM's own."""

from __future__ import annotations

from typing import Final

from kuberoll_workers.serving.engines.spot_check import Tally

# As vLLM's metrics have it.
_REPLICA: Final = "ReplicaId"


class SpotMetrics:
    """`ray_kuberoll_self_check_*` of a replica."""

    def __init__(self) -> None:
        from ray.util.metrics import Counter, Gauge

        keys, tags = (_REPLICA,), {_REPLICA: _replica_id()}
        self._responses = Counter("kuberoll_self_check_responses", "Finished responses of the engine.", keys)
        self._checked = Counter(
            "kuberoll_self_check_checked_responses", "Finished responses whose tokens were scored once more.", keys
        )
        self._largest = Gauge(
            "kuberoll_self_check_largest_difference_nats",
            "Largest difference of a token's log-probabilities, as it was reported and as it was scored once more.",
            keys,
        )
        for metric in (self._responses, self._checked, self._largest):
            metric.set_default_tags(tags)
        self._said = Tally()

    @classmethod
    def of_this_process(cls) -> SpotMetrics | None:
        """Metrics of this process; None without Ray."""
        import ray

        return cls() if ray.is_initialized() else None

    def set(self, tally: Tally) -> None:
        """Set the metrics to what was seen since the engine's start."""
        for counter, now, before in (
            (self._responses, tally.responses, self._said.responses),
            (self._checked, tally.checked, self._said.checked),
        ):
            if now > before:
                counter.inc(now - before)
        self._largest.set(tally.largest)
        self._said = tally


def _replica_id() -> str:
    """The id of the Ray Serve replica that this process is; empty: it is none."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return ""
