"""The sum of a program's CPU time, over histories of processes that live, exit, are killed, or are never seen."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments.programs import Limits, Program, ProgramRunner
from kuberoll_workers.environments.programs.cpu_time import CpuTime, of_process

TICK = 0.02
HISTORY = st.lists(
    st.tuples(
        st.integers(0, 12),  # the tick in which it is made
        st.floats(0, 0.08),  # how long it lives
        st.sampled_from(["exits", "is killed"]),
        st.floats(0, 1),  # share of a processor that it uses
    ),
    max_size=12,
)


@given(HISTORY)
def test_no_process_runs_for_free(history: list[tuple[int, float, str, float]]) -> None:
    """Whatever its end, and whether or not anybody waits for it, what a process used is in the sum.

    Each is made a moment after a look, so that those that are short are never seen.
    """
    now = 0.0
    lives = [((tick + 0.1) * TICK, (tick + 0.1) * TICK + life, end, share) for tick, life, end, share in history]

    def clock(process: int) -> float | None:
        made, gone, _, share = lives[process]
        return (min(now, gone) - made) * share if made <= now <= gone else None

    # Two processors are less than what runs at a time: the sum is bounded by what these could do.
    cpu = CpuTime(0.0, processors=len(lives) + 1, clock=clock)
    # The program itself uses nothing.
    cpu._seen = 1
    events = sorted(
        [(made, 0, number) for number, (made, *_) in enumerate(lives)]
        + [(gone, 1, number) for number, (_, gone, *_) in enumerate(lives)]
        + [(tick * TICK, 2, 0) for tick in range(1, 20)]
    )
    for moment, kind, number in events:
        now = moment
        if kind == 0:
            cpu.making()
        elif kind == 1 and lives[number][2] == "exits":
            cpu.exiting(number)
        elif kind == 2:
            cpu.look([n for n, (made, gone, *_) in enumerate(lives) if made <= now < gone], now)
    used = sum((gone - made) * share for made, gone, _, share in lives)
    assert cpu.seconds >= used - 1e-9
    # What exits is counted to the nanosecond.
    if all(end == "exits" for *_, end, _ in lives):
        assert abs(cpu.seconds - used) < 1e-9


def test_a_process_has_a_clock() -> None:
    before = of_process(os.getpid())
    assert before is not None
    sum(range(200_000))
    after = of_process(os.getpid())
    assert after is not None
    assert after > before
    assert of_process(1 << 22) is None


_IDLE_CHILDREN = """
import os, time
for _ in range(50):
    if os.fork() == 0:
        time.sleep(0.03)
        os._exit(0)
    os.wait()
used = os.times()
print(used.user + used.system + used.children_user + used.children_system)
"""


@pytest.mark.slow
def test_children_that_exit_between_two_looks_are_counted_by_their_clocks() -> None:
    with ProgramRunner(parallel=1) as runner:
        outcome = runner.run(Program.python(_IDLE_CHILDREN, limits=Limits(cpu_seconds=60, wall_seconds=600)))
    assert outcome.kind == "ok", outcome
    # If each was missed, it would be the time between two looks for each: a second.
    assert float(outcome.stdout) - 0.1 < outcome.cpu_seconds < float(outcome.stdout) + 0.5
