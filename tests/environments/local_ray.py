"""A Ray of one's own, as small as it gets, for tests with real actors."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

# Ray gives its processes 30 seconds, which no setting changes; beside an engine that starts they may need more.
_ATTEMPTS = 4


@contextmanager
def local_ray() -> Iterator[None]:
    # Not pytest's directory: the paths of sockets below it would be too long.
    scratch = tempfile.mkdtemp(prefix="kr-", dir="/tmp")
    with mock.patch.dict(os.environ, {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}):
        import ray

        for attempt in reversed(range(_ATTEMPTS)):
            try:
                # Actors of these tests ask for no CPU; one worker process each is all that is started.
                ray.init(
                    address="local",
                    num_cpus=1,
                    include_dashboard=False,
                    log_to_driver=False,
                    object_store_memory=80 * 1024**2,
                    _temp_dir=scratch,
                )
                break
            except Exception as error:
                ray.shutdown()
                if not attempt or "timed out during startup" not in str(error):
                    raise
        try:
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(scratch, ignore_errors=True)
