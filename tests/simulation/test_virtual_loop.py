"""The event loop in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.simulation.engine_model import NANOSECONDS
from kuberoll_workers.simulation.virtual_loop import LONGEST_SECONDS, NothingLeft, TimeEnds, run_virtually
from tests.examples import examples


def test_timers_come_in_order_at_their_times() -> None:
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(
            sleeper("month", 2.6e6), sleeper("day", 86_400.0), sleeper("now", 0.0), sleeper("tick", 1e-6)
        )
        return seen

    seen = run_virtually(main())
    assert [name for name, _ in seen] == ["now", "tick", "day", "month"]
    assert [time for _, time in seen] == pytest.approx([0.0, 1e-6, 86_400.0, 2.6e6], abs=1e-8)


def test_time_limits_of_asyncio_are_virtual() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(600)


def test_a_wait_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingLeft, match="no timer"):
        run_virtually(main())


def test_virtual_time_ends_with_an_error() -> None:
    with pytest.raises(TimeEnds, match="virtual time"):
        run_virtually(asyncio.sleep(LONGEST_SECONDS + 1))


@settings(max_examples=examples(1000))
@given(st.integers(0, int(LONGEST_SECONDS) * NANOSECONDS))
def test_every_time_of_an_engine_is_told_by_its_timer(due: int) -> None:
    assert round(due / NANOSECONDS * NANOSECONDS) == due


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="threads have no place"):
        run_virtually(main())
