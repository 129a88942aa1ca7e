"""The children of a job as the watches have told of them.

They may be a moment old, and that does no harm: names are deterministic and writes are server-side applies, so that
what was made already and is not seen yet is made once; deletions name the uid that was seen, so that a successor is
not meant; and whatever was decided too early is decided again when the event comes. The job itself, whose spec
decides and whose status is written, is read live by the reconciler.
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
        progress: What its pods have said, `ProgressPoller.latest`.
    """
    born = raw["metadata"].get("creationTimestamp") or ""
    # Pods of a deleted job of the same name are on their way out, and their words are about its shards.
    pods, departed = (
        [pod for pod in found if (pod["metadata"].get("creationTimestamp") or born) >= born]
        for found in (cache.pods(key), cache.departed(key))
    )
    heard = progress(key, raw, pods)
    return Observed(
        children=cache.children(key), pods=pods, departed=departed, progress=heard.progress, served=heard.served
    )
