"""What a trainer counts, as one worker of its run publishes it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kuberoll_workers.data.consumer_counts import ConsumerCounts
from kuberoll_workers.telemetry.consumer import ConsumerMetrics


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"rolloutjob": "job", **labels})


def test_what_came_since_the_start_is_counted_once() -> None:
    registry = CollectorRegistry()
    metrics = ConsumerMetrics("job", registry)
    # Published by an earlier worker.
    metrics.update(ConsumerCounts(taken_groups=100, lag={0: 50}, publications=9), since_start=True)
    for _ in range(2):
        metrics.update(
            ConsumerCounts(
                taken_groups=104,
                ready_groups=3,
                lag={0: 52, 3: 1},
                publications=10,
                publish_seconds={"load": 0.5},
                stale_trajectories=2,
                stale_tokens=40,
                waited_seconds=1.5,
            ),
            since_start=False,
        )
    assert value(registry, "kuberoll_groups_taken_total") == 4
    assert value(registry, "kuberoll_groups_ready") == 3
    assert value(registry, "kuberoll_policy_lag_count") == 3
    assert value(registry, "kuberoll_policy_lag_bucket", le="0.0") == 2
    assert value(registry, "kuberoll_policy_lag_sum") == 3
    assert value(registry, "kuberoll_publications_total") == 1
    assert value(registry, "kuberoll_publish_seconds_total", stage="load") == 0.5
    assert value(registry, "kuberoll_stale_trajectories_total") == 2
    assert value(registry, "kuberoll_stale_tokens_total") == 40
    assert value(registry, "kuberoll_trainer_waiting_seconds_total") == 1.5


def test_the_first_plan_of_a_run_that_had_none_is_new() -> None:
    registry = CollectorRegistry()
    metrics = ConsumerMetrics("job", registry)
    metrics.update(ConsumerCounts(taken_groups=4), since_start=False)
    metrics.hold(2.5)
    assert value(registry, "kuberoll_groups_taken_total") == 4
    assert value(registry, "kuberoll_held_back_seconds_total") == 2.5
