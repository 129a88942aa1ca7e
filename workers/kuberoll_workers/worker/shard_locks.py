"""Waiting for the locks of shards that another worker holds.

Two workers never write one shard. On one machine the other worker is about to end, or somebody has to end it. In a
cluster it may go on where nothing reaches it: behind a partition, or on a node that will not come back. The kernel
gives its locks up when it ends, and the server of a shared volume when it has not heard of its machine for long enough;
until then, however long, a successor waits and says for what.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from kuberoll_workers.output.storage import ShardHeld, Storage, StorageError
from kuberoll_workers.rollouts.admission import Drain

_LOOK_SECONDS = 0.05
_LONGEST_LOOK_SECONDS = 5.0


async def hold_shards(
    storage: Storage,
    shards: Collection[int],
    *,
    patience: float | None,
    drain: Drain,
    waiting: Callable[[str | None], None],
) -> bool:
    """Lock shards; `storage.release_shards` releases them.

    Args:
        patience: Seconds after which a worker that still holds one is an error; None: it is waited for.
        waiting: Called with what is waited for, and with None when that is over.

    Returns:
        False if drained while it waited.

    Raises:
        StorageError: Another worker has held one for too long, or the storage cannot be used.
    """
    loop = asyncio.get_running_loop()
    began, pause, said = loop.time(), _LOOK_SECONDS, False
    while True:
        try:
            await asyncio.to_thread(storage.hold_shards, shards)
        except ShardHeld as held:
            if patience is not None and loop.time() - began > patience:
                raise StorageError(f"{held}: end it (`fuser {held.lock}` names it), then use --resume") from held
            if patience is None and not said:
                said = True
                waiting(
                    f"the lock of shard {held.shard}, which another worker holds. That one may go on where the cluster "
                    "does not reach it; this one begins when it ends, or the volume's server gives its lock up. If its "
                    "node will not come back: kubectl taint node NODE "
                    "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await drain.wait()
            if drain.is_set():
                return False
            pause = min(_LONGEST_LOOK_SECONDS, 1.5 * pause)
        else:
            if said:
                waiting(None)
            return True
