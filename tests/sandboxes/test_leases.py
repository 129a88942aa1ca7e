"""What is counted of sandboxes, from their start to their end, however that comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kuberoll_workers.data.causes import Cause, Evidence
from kuberoll_workers.environments.exception_causes import cause_of
from kuberoll_workers.sandboxes.driver import Ending, SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.leases import Lease, Sandboxes
from kuberoll_workers.sandboxes.meters import FAILED, REMOVED, STARTED
from kuberoll_workers.telemetry import definitions as metrics
from tests.sandboxes.conftest import Leasing

pytestmark = pytest.mark.processes


def counts(sandboxes: Sandboxes) -> dict[str, float]:
    """What has been counted, without zeros."""
    meters = sandboxes.meters
    found = {
        "waiting": meters.value(metrics.SANDBOXES_WAITING),
        "in use": meters.value(metrics.SANDBOXES_IN_USE),
        "started": meters.value(metrics.SANDBOX_STARTS, STARTED),
        "not started": meters.value(metrics.SANDBOX_STARTS, FAILED),
        "lost": meters.value(metrics.SANDBOXES_LOST),
        "removed": meters.value(metrics.SANDBOX_REMOVALS, REMOVED),
        "not removed": meters.value(metrics.SANDBOX_REMOVALS, FAILED),
        "left": meters.value(metrics.SANDBOXES_LEFT),
    }
    return {name: count for name, count in found.items() if count}


async def test_starts_and_ends(lease: Leasing, sandboxes: Sandboxes) -> None:
    held: list[Lease] = []
    async with lease() as one, lease() as other:
        assert counts(sandboxes) == {"in use": 2, "started": 2}
        held += [one, other]
        assert one.use is None
    assert counts(sandboxes) == {"started": 2, "removed": 2}
    observed = sandboxes.meters.take()
    assert observed[metrics.SANDBOX_START_SECONDS.name, ()] == [one.start_seconds for one in held]
    for one in held:
        assert one.use is not None
        assert one.use.start_seconds == one.start_seconds
        assert one.use.seconds > 0
        assert not one.use.left


async def test_an_error_of_whoever_has_it_is_no_loss(lease: Leasing, sandboxes: Sandboxes) -> None:
    with pytest.raises(RuntimeError, match="their own"):
        async with lease():
            raise RuntimeError("their own")
    assert counts(sandboxes) == {"started": 1, "removed": 1}


async def test_those_that_wait_and_those_that_never_start(sandboxes: Sandboxes, busybox: str) -> None:
    driver, go = sandboxes._driver, asyncio.Event()

    async def slow(name: str, spec: SandboxSpec) -> Any:
        await go.wait()
        raise SandboxUnavailable("no room")

    driver.create = slow  # type: ignore[method-assign]

    async def have() -> None:
        async with sandboxes.lease(SandboxSpec(image=busybox)):
            pytest.fail("it started")

    # More than start at a time.
    tasks = [asyncio.create_task(have()) for _ in range(10)]
    await asyncio.sleep(0)
    assert counts(sandboxes) == {"waiting": 10}
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    # Nobody wants it any more: no failure.
    assert counts(sandboxes) == {"waiting": 9}
    go.set()
    results = await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert [type(result) for result in results] == [SandboxUnavailable] * 9
    assert counts(sandboxes) == {"not started": 9}


async def test_one_that_ends_while_it_starts_is_lost_too(sandboxes: Sandboxes, busybox: str) -> None:
    async def end(name: str, spec: SandboxSpec) -> Any:
        raise SandboxLost("its process has ended")

    sandboxes._driver.create = end  # type: ignore[method-assign]
    with pytest.raises(SandboxLost):
        async with sandboxes.lease(SandboxSpec(image=busybox)):
            pytest.fail("it started")
    assert counts(sandboxes) == {"not started": 1, "lost": 1}


async def test_a_loss_says_what_became_of_the_sandbox(lease: Leasing, sandboxes: Sandboxes) -> None:
    driver = sandboxes._driver
    asked: list[str] = []

    async def ending(name: str) -> Ending | None:
        asked.append(name)
        if len(asked) == 3:
            raise OSError("whoever knows is gone, too")
        return None if len(asked) == 2 else Ending("its node had no memory left", Evidence(event="Evicted"))

    driver.ending = ending  # type: ignore[method-assign]
    said = []
    for _ in range(3):
        with pytest.raises(SandboxLost) as lost:
            async with lease():
                raise SandboxLost("the connection broke")
        said.append((str(lost.value), cause_of(lost.value)))
    assert said == [
        ("the connection broke; its node had no memory left", Cause("SandboxLost", Evidence(event="Evicted"))),
        ("the connection broke", Cause("SandboxLost")),
        ("the connection broke", Cause("SandboxLost")),
    ]
    assert counts(sandboxes) == {"started": 3, "lost": 3, "removed": 3}


async def test_one_that_cannot_be_removed_is_left_until_its_lease_ends(lease: Leasing, sandboxes: Sandboxes) -> None:
    driver = sandboxes._driver
    remove = driver.remove

    async def refuse(name: str) -> None:
        raise SandboxError("who is to do that?")

    async with lease(lease_seconds=1.0) as one:
        driver.remove = refuse  # type: ignore[method-assign]
    assert counts(sandboxes) == {"started": 1, "not removed": 1, "left": 1}
    assert one.use is not None
    assert one.use.left
    # The loop's timers end in their order.
    ended = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, ended.set)
    await ended.wait()
    assert counts(sandboxes) == {"started": 1, "not removed": 1}
    driver.remove = remove  # type: ignore[method-assign]
