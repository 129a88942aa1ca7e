"""The parts of examples/train that need no engine; tests/local/test_train_example.py runs the whole."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLE))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_the_puzzles_are_those_of_their_script_and_none_is_in_both_files(part: Any) -> None:
    boards = []
    for name, rows in zip(("train", "held-out"), part("puzzles").split(), strict=True):
        stored = [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]
        assert stored == [{**row, "idx": index} for index, row in enumerate(rows)]
        boards += [json.dumps(row["metadata"]["board"]) for row in stored]
    # Of the 360 states of a 2×3 puzzle these are one to eight moves away from the goal.
    assert len(boards) == len(set(boards)) == 57


def test_the_puzzles_of_both_files_are_equally_hard(part: Any) -> None:
    puzzles = part("puzzles")
    boards = [
        [puzzles.parse_board(json.loads(line)["metadata"]["board"]) for line in (EXAMPLE / f"{name}.jsonl").open()]
        for name in ("train", "held-out")
    ]
    trained, held_out = ([puzzles.moves_to_goal(board) for board in some] for some in boards)
    assert max(trained) == max(held_out) == 8
    assert abs(sum(trained) / len(trained) - sum(held_out) / len(held_out)) < 0.5


def test_steps_that_a_killed_trainer_repeats_count_once(part: Any, tmp_path: Path) -> None:
    steps = part("steps")
    file = tmp_path / "steps.jsonl"
    first, second = (steps.Step(step=number, version=number, groups=[[number, 0]], tokens=60) for number in (1, 2))
    again = dataclasses.replace(second, version=4, groups=[[7, 0]], stale_tokens=40)
    for step in (first, second, again):
        steps.append(file, step)
    with file.open("a") as lines:
        lines.write('{"step": 3, "vers')
    assert steps.read(file) == [first, again]
    assert steps.waste(steps.read(file)) == 40 / 160


def test_the_picture_has_a_dot_for_every_step(part: Any) -> None:
    step = part("steps").Step
    known = [step(step=0, version=0, groups=[], held_out=0.25)]
    known += [step(step=n, version=n, groups=[], reward=n / 10, lag=1.0, most_lag=3, tokens=9) for n in range(1, 11)]
    known[-1] = dataclasses.replace(known[-1], held_out=0.9, stale_tokens=10)
    drawn = ElementTree.fromstring(part("picture").picture(known))
    names = [element.tag.partition("}")[2] for element in drawn.iter()]
    assert names.count("circle") == 10 + 2
    texts = [element.text for element in drawn.iter() if element.tag.endswith("}text")]
    assert {"0.25", "0.90", "10 %", "3"} <= set(texts)


def test_nothing_is_drawn_before_the_first_step(part: Any, tmp_path: Path) -> None:
    part("picture").draw([part("steps").Step(step=0, version=0, groups=[], held_out=0.2)], tmp_path / "learning.svg")
    assert not list(tmp_path.iterdir())


WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of the job, which goes on until its input ends."""
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_trainer_whose_job_has_died_is_ended(part: Any, job: subprocess.Popen[bytes]) -> None:
    job.kill()
    # It would go on as long as this test.
    assert part("watch").train(["tail", "-f", "/dev/null"], job) == -9


@pytest.mark.parametrize("code", [0, 3])
def test_a_trainer_ends_by_itself_while_its_job_goes_on(part: Any, job: subprocess.Popen[bytes], code: int) -> None:
    assert part("watch").train([sys.executable, "-c", f"raise SystemExit({code})"], job) == code
    assert job.poll() is None


def test_a_trainer_is_waited_for_whose_job_it_has_ended(part: Any, job: subprocess.Popen[bytes]) -> None:
    job.communicate()
    assert part("watch").train([sys.executable, "-c", "raise SystemExit(3)"], job) == 3
