"""What environments count themselves: published under their names, with the sum of all their instances."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.environments.interface import EnvironmentInterface, EnvironmentReturn
from kuberoll_workers.telemetry import Meters, RolloutMetrics
from kuberoll_workers.telemetry import definitions as metrics
from kuberoll_workers.telemetry.meters import series_name
from kuberoll_workers.worker.config import Progress
from kuberoll_workers.worker.environments import open_environments

SERIES: list[Any] = [
    (metrics.SANDBOXES_IN_USE, ()),
    (metrics.SANDBOX_STARTS, ("started",)),
    (metrics.SANDBOX_STARTS, ("failed",)),
    (metrics.SANDBOX_START_SECONDS, ()),
]


def value(rollouts: RolloutMetrics, name: str, environment: str = "env", **labels: str) -> float | None:
    labels = {"rolloutjob": "job", "environment": environment, **labels}
    return rollouts.registry.get_sample_value(name, labels)


def test_what_has_not_happened_yet_is_0() -> None:
    rollouts = RolloutMetrics("job")
    assert value(rollouts, "kuberoll_sandboxes_in_use") is None
    rollouts.environment("env").meters.watch(Meters(SERIES))
    rollouts.flush()
    assert value(rollouts, "kuberoll_sandboxes_in_use") == 0
    assert value(rollouts, "kuberoll_sandbox_starts_total", result="failed") == 0
    assert value(rollouts, "kuberoll_sandbox_start_seconds_count") == 0
    # Of what it has not named there is nothing.
    assert value(rollouts, "kuberoll_sandboxes_lost_total") is None


Events = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["begin", "end", "fail", "flush"])), max_size=40)


@given(events=Events)
def test_instances_together_have_counted_what_each_has(events: list[tuple[int, str]]) -> None:
    rollouts = RolloutMetrics("job")
    instances = [Meters(SERIES), Meters(SERIES)]
    published = rollouts.environment("env").meters
    published.watch(instances[0])
    counts: Counter[str] = Counter()
    for number, event in events:
        meters = instances[number]
        if number and not counts["watched"]:
            counts["watched"] = 1
            published.watch(meters)
        if event == "flush":
            rollouts.flush()
            continue
        counts[event] += 1
        if event == "begin":
            meters.add(metrics.SANDBOX_STARTS, "started")
            meters.add(metrics.SANDBOXES_IN_USE)
            meters.observe(metrics.SANDBOX_START_SECONDS, 0.5)
        elif event == "end":
            meters.add(metrics.SANDBOXES_IN_USE, by=-1)
        else:
            meters.add(metrics.SANDBOX_STARTS, "failed")
    rollouts.flush()
    used = counts["begin"] - counts["end"]
    assert value(rollouts, "kuberoll_sandboxes_in_use") == used
    assert value(rollouts, "kuberoll_sandbox_starts_total", result="started") == counts["begin"]
    assert value(rollouts, "kuberoll_sandbox_starts_total", result="failed") == counts["fail"]
    assert value(rollouts, "kuberoll_sandbox_start_seconds_count") == counts["begin"]
    assert value(rollouts, "kuberoll_sandbox_start_seconds_sum") == counts["begin"] / 2
    assert rollouts.activity().meters == {
        "kuberoll_sandboxes_in_use": used,
        "kuberoll_sandbox_starts_total{started}": counts["begin"],
        "kuberoll_sandbox_starts_total{failed}": counts["fail"],
    }


def test_a_run_has_the_sum_of_its_workers_and_environments() -> None:
    parts = []
    for number in (1, 2):
        rollouts = RolloutMetrics("job")
        for name in ("one", "two"):
            meters = Meters(SERIES)
            rollouts.environment(name).meters.watch(meters)
            meters.add(metrics.SANDBOXES_IN_USE, by=number)
        parts.append(Progress(trajectories=number, done=number == 1))
        parts[-1].update(rollouts.activity())
    # One that has not said anything yet.
    total = Progress.sum([*parts, Progress(done=True)])
    assert (total.trajectories, total.done) == (3, False)
    assert total.meters[series_name((metrics.SANDBOXES_IN_USE.name, ()))] == 6
    assert total.meters[series_name((metrics.SANDBOX_STARTS.name, ("failed",)))] == 0


class Counting(EnvironmentInterface):
    """An environment that counts its steps."""

    steps: ClassVar[int] = 0

    def __init__(self, config: dict[str, Any]) -> None:
        self.meters: Any = config["meters"] if "meters" in config else Meters(SERIES)

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        self.meters.add(metrics.SANDBOXES_IN_USE, by=len(metadata))
        count = len(message_log_batch)
        return EnvironmentReturn(
            [{"role": "environment", "content": ""}] * count, metadata, None, [0.0] * count, [True] * count
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


def job(*environments: dict[str, Any]) -> RolloutJob:
    return RolloutJob.model_validate({
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "job"},
        "spec": {
            "generation": {"model": {"source": "none"}},
            "environments": [{"entrypoint": f"{__name__}:Counting", **one} for one in environments],
            "dataset": {"source": {"uri": "rows.jsonl"}},
        },
    })  # fmt: skip


async def test_an_environment_in_the_worker_is_published_by_its_name() -> None:
    rollouts = RolloutMetrics("job")
    others = {"name": "others", "isolation": "Inline", "config": {"meters": "its own"}}
    async with open_environments(job({"name": "env", "isolation": "Inline"}, others), metrics=rollouts) as environments:
        await environments["env"].step([{"role": "user", "content": "x"}], {})
        rollouts.flush()
        assert value(rollouts, "kuberoll_sandboxes_in_use") == 1
        assert value(rollouts, "kuberoll_sandboxes_in_use", "others") is None
