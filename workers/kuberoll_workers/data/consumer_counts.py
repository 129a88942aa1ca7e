"""What the consumer of a run has had of it, as workers publish it in their metrics."""

from __future__ import annotations

import msgspec


class ConsumerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer has had of a run, for metrics.

    Attributes:
        taken_groups: Groups that it has taken.
        ready_groups: Groups that have ended and that it has not taken.
        stale_trajectories, stale_tokens: Finished trajectories that were too old, and tokens that the policy generated
            for them.
        lag: Trajectories that it has taken, by their lag in versions.
        waited_seconds: Seconds for which it has waited for groups.
        publications: Number of weights that it has published.
        publish_seconds: Seconds of publishing, by phase.
    """

    taken_groups: int = 0
    ready_groups: int = 0
    stale_trajectories: int = 0
    stale_tokens: int = 0
    lag: dict[int, int] = {}
    waited_seconds: float = 0.0
    publications: int = 0
    publish_seconds: dict[str, float] = {}
