"""A worker whose shard another one still writes: it waits, says for what, and never writes beside the other."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kuberoll_workers.output.storage import ShardHeld, Storage, StorageError, open_storage
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.worker import shard_locks
from kuberoll_workers.worker.shard_locks import hold_shards
from tests.rollouts.fakes import until


class Held:
    """A storage whose shard 3 another worker holds."""

    def __init__(self) -> None:
        self.held = True
        self.tries = 0

    def hold_shards(self, shards: Collection[int]) -> None:
        self.tries += 1
        if self.held:
            raise ShardHeld("another worker writes", shard=3, lock=Path("/run/.shards.lock"))


def holding(storage: Any, words: list[str | None], *, patience: float | None, drain: Drain | None = None) -> Any:
    return hold_shards(cast("Storage", storage), [3], patience=patience, drain=drain or Drain(), waiting=words.append)


async def test_in_a_cluster_it_waits_aloud_until_the_lock_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_locks, "_LONGEST_LOOK_SECONDS", 0.01)
    storage, words = Held(), list[str | None]()
    waiting = asyncio.create_task(holding(storage, words, patience=None))
    await until(lambda: storage.tries >= 5)
    (reason,) = words
    assert reason is not None
    assert reason.startswith("the lock of shard 3, which another worker holds.")
    assert "out-of-service" in reason
    storage.held = False
    assert await waiting is True
    assert words == [reason, None]


async def test_on_one_machine_somebody_has_to_end_the_other() -> None:
    words = list[str | None]()
    with pytest.raises(StorageError, match=r"another worker writes: end it \(`fuser /run/.shards.lock` names it\)"):
        await holding(Held(), words, patience=0.0)
    assert words == []


async def test_one_that_drains_waits_no_longer() -> None:
    storage, drain = Held(), Drain()
    waiting = asyncio.create_task(holding(storage, [], patience=None, drain=drain))
    await until(lambda: storage.tries >= 1)
    drain.set()
    assert await waiting is False


async def test_one_that_is_to_end_as_it_starts_takes_a_free_lock() -> None:
    """It counts what is stored, and says so at its end."""
    storage, drain = Held(), Drain()
    storage.held = False
    drain.set()
    assert await holding(storage, [], patience=None, drain=drain) is True


async def test_a_free_lock_is_taken_without_a_word() -> None:
    storage, words = Held(), list[str | None]()
    storage.held = False
    assert await holding(storage, words, patience=None) is True
    assert words == []


@contextmanager
def other_worker(place: Path, *, shard: int = 3) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds a shard."""
    place.mkdir(parents=True, exist_ok=True)
    program = (
        "import sys\n"
        "from kuberoll_workers.output.storage import open_storage\n"
        "open_storage(sys.argv[1]).hold_shards([int(sys.argv[2])])\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(place), str(shard)], stdin=-1, stdout=-1)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_the_lock_of_a_worker_that_is_killed_is_free(tmp_path: Path) -> None:
    storage, words = open_storage(str(tmp_path)), list[str | None]()
    with other_worker(tmp_path) as process:
        waiting = asyncio.create_task(holding(storage, words, patience=None))
        await until(lambda: bool(words))
        process.kill()
        assert await waiting is True
    assert words[-1] is None
    storage.release_shards()
