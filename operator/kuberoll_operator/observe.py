"""Observation of a job's children, from the cache of the watches.

The cache may lag by a moment, which does no harm. Names are deterministic and writes are server-side applies, so a
child that exists but is not seen yet is not created twice. Deletions name the uid that was seen, so they never hit a
successor. A decision that was made too early is made again when the event arrives. The reconciler reads the job itself
live, because its spec decides and its status is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kuberoll_operator.cache import Cache
from kuberoll_operator.model import Key, Object, Observed, PodReports

Progress = Callable[[Key, Object, Sequence[Object]], PodReports]


def observe(cache: Cache, key: Key, raw: Object, progress: Progress) -> Observed:
    """Everything that belongs to a job.

    Args:
        raw: The job, live.
        progress: Reports of its pods: `ReportPoller.latest`.
    """
    born = raw["metadata"].get("creationTimestamp") or ""
    # Pods of a deleted job of the same name may still be terminating; they report on that job's shards.
    pods, departed = (
        [pod for pod in found if (pod["metadata"].get("creationTimestamp") or born) >= born]
        for found in (cache.pods(key), cache.departed(key))
    )
    heard = progress(key, raw, pods)
    return Observed(
        children=cache.children(key),
        pods=pods,
        departed=departed,
        progress=heard.progress,
        counted=heard.counted,
        served=heard.served,
    )
