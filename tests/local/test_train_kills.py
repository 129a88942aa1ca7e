"""`make train` whose trainer and rollouts are killed in turns: it learns, and has each group once and none too old."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_api.manifest.loading import load_job
from kuberoll_workers.output.records import dropped
from kuberoll_workers.output.storage import DirectoryStorage
from tests.local.support import EXAMPLES, PATIENCE_SECONDS, trajectories

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3000)]

EXAMPLE = EXAMPLES / "train"
JOB = load_job(EXAMPLE / "rolloutjob.yaml").spec
REPEATS = JOB.dataset.repeats
STEPS, GROUPS = 80, 8
KILLS = 10
ROLES = {"trainer": "grpo.py", "rollouts": "rolloutjob.yaml"}
"""What is killed, and a word of its command."""


class Training:
    """One life of `watch.py`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._before = len(lines(directory))
        command = [sys.executable, str(EXAMPLE / "watch.py"), "--output", str(directory), "--resume"]
        command += ["--steps", str(STEPS), "--groups", str(GROUPS), "--evaluate-every", str(STEPS)]
        with (directory.parent / "watch.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def until(self, steps: int) -> None:
        """Wait until it has made so many steps."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(lines(self._directory)) < self._before + steps:
            self._goes_on(deadline)

    def part(self, role: str) -> psutil.Process:
        """The process of a role; waits for it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self.process.pid).children():
                    if any(ROLES[role] in word for word in child.cmdline()):
                        return child
            self._goes_on(deadline)

    def _goes_on(self, deadline: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.02)
        said = (self._directory.parent / "watch.log").read_text()
        assert self.process.poll() is None, f"it ended by itself:\n{said[-4000:]}"
        assert time.monotonic() < deadline, said[-4000:]


@contextmanager
def training(directory: Path) -> Iterator[Training]:
    """Start it, or go on with it; what is left of it at the end is killed."""
    life = Training(directory)
    try:
        yield life
    finally:
        left = family(life.process.pid)
        life.process.kill()
        life.process.wait(timeout=PATIENCE_SECONDS)
        end(left)


def family(pid: int) -> list[psutil.Process]:
    """The descendants of a process that live."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)


def lines(directory: Path) -> list[dict[str, Any]]:
    """The steps in the order in which they were made, also those that were lost."""
    file = directory / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def test_trainer_and_rollouts_that_are_killed_in_turns(tmp_path: Path) -> None:
    chance = random.Random(18)
    directory = tmp_path / "training"
    directory.mkdir()
    killed: list[psutil.Process] = []
    try:
        for kill in range(KILLS):
            role = list(ROLES)[kill % 2]
            with training(directory) as life:
                victim = life.part(role)
                # Anywhere: as it starts or after some steps, before the checkpoint of the last one or in the next.
                life.until(chance.randint(0, 9))
                time.sleep(chance.choice((0.0, chance.uniform(0, 3))))
                below = family(victim.pid)
                killed += [victim, *below]
                victim.kill()
                # It says so, and does not wait for the one that is gone.
                assert life.process.wait(timeout=PATIENCE_SECONDS) not in (0, -9)
        with training(directory) as life:
            assert life.process.wait(timeout=1000) == 0, (tmp_path / "watch.log").read_text()[-4000:]
        # What the killed ones had started has ended, too.
        _, left = psutil.wait_procs(killed, timeout=PATIENCE_SECONDS)
        assert not left
    finally:
        end(killed)
    check_learning(lines(directory))
    check_journals(lines(directory), directory / "run")


def check_learning(made: list[dict[str, Any]]) -> None:
    """The steps are whole, and the policy has learned."""
    # A step that was lost with its trainer is made again: the last of each number counts.
    steps = {line["step"]: line for line in made}
    assert sorted(steps) == list(range(STEPS + 1))
    assert steps[STEPS]["held_out"] >= max(0.8, 2 * steps[0]["held_out"])


def check_journals(made: list[dict[str, Any]], output: Path) -> None:
    """Each group was taken once, whole, and with no token that was too old then."""
    steps = {line["step"]: line for line in made if line["step"]}
    # A step ends with the publication of the next version.
    taken = [(tuple(key), line["version"] - 1) for line in steps.values() for key in line["groups"]]
    versions = dict(taken)
    assert len(versions) == len(taken) == STEPS * GROUPS
    samples, most_lag = Counter[tuple[int, ...]](), Counter[int]()
    for record in trajectories(output):
        key = record.task_index, record.rollout_index // REPEATS
        if key not in versions:
            continue
        samples[key] += 1
        oldest = min(int(name) for message in record.messages for name, *_ in message.policy_versions or ())
        most_lag[versions[key] - oldest] += 1
    assert set(samples.values()) == {REPEATS}
    assert samples.keys() == versions.keys()
    assert JOB.rollout.on_policy is not None
    assert JOB.rollout.on_policy.max_lag is not None
    assert 0 <= min(most_lag) <= max(most_lag) <= JOB.rollout.on_policy.max_lag
    assert max(most_lag) == max(line["most_lag"] for line in steps.values())
    # What was wasted is counted once, in whichever life it is read.
    stale = {record.key: record.tokens.generated for record in dropped(DirectoryStorage(output))}
    assert steps[STEPS]["stale_tokens"] <= sum(stale.values())
