"""Runs to look at: several environments, rewards of every kind, text of several turns."""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from kuberoll_workers.analysis.aggregation.aggregates import aggregate
from kuberoll_workers.analysis.report.data import ReportData, report_data
from kuberoll_workers.analysis.report.observer import ReportObserver
from kuberoll_workers.analysis.report.token_texts import TokenTexts
from kuberoll_workers.analysis.report.trajectory_sample import MOST, MOST_BYTES, TrajectorySample
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import (
    Branch,
    DroppedRecord,
    FailureRecord,
    Timing,
    TokenCounts,
    TrajectoryRecord,
    encode_line,
)
from kuberoll_workers.data.stop_reasons import StopReason
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_directory import MANIFEST, RunManifest
from kuberoll_workers.output.run_files import RunFiles

_PUZZLE = (
    "Slide the tiles until they stand in this order, with the gap (_) last:\n1 2 3\n4 5 6\n7 8 _\n"
    "Each turn, write one move: <action>up</action>, <action>down</action>, <action>left</action> or "
    "<action>right</action>.\nThe board is:\n{board}\n"
)
_QUESTIONS = (
    "A train leaves at {a}:15 and arrives {b} minutes later. What time is it then?",
    "A shop sells pens in boxes of {a}. How many boxes are needed for {b} pens?",
    "What is the remainder of {b}**2 divided by {a}?",
)
_CAUSES = (
    ("infrastructure", "generation", "the endpoint is gone after 5 tries: connection refused"),
    ("environment", "step", "TimeoutError: step took longer than 30 s"),
    ("data", "prompt", "token 151936 is outside the model's vocabulary"),
)


def message(role: str, content: str, turn: int, *, truncated: bool = False) -> Message:
    sampled = role == "assistant" and turn > 0
    return Message(
        role, content, token_array(range(len(content) // 4 + 1)), turn=turn, truncated=truncated, sampled=sampled
    )


def trajectory(
    task: int,
    rollout: int = 0,
    *,
    environment: str = "puzzle",
    messages: Iterable[Message] = (),
    rewards: Iterable[float] = (1.0,),
    stop_reason: StopReason = "terminated",
    seconds: Iterable[tuple[float, float]] | None = None,
) -> TrajectoryRecord:
    messages = list(messages) or [message("user", "hi", 0), message("assistant", "yes", 1)]
    rewards = list(rewards)
    times = list(seconds) if seconds is not None else [(0.5, 0.25)] * len(rewards)
    counts = [0, 0, 0]
    for item in messages:
        counts[0 if item.turn == 0 else 1 if item.role == "assistant" else 2] += len(item.token_ids)
    return TrajectoryRecord(
        task_index=task,
        rollout_index=rollout,
        task_name=environment,
        idx=f"row-{task}",
        messages=messages,
        total_reward=sum(rewards),
        rewards=rewards,
        stop_reason=stop_reason,
        turn_count=len(rewards),
        tokens=TokenCounts(*counts),
        timing=Timing([pair[0] for pair in times], [pair[1] for pair in times]),
        metadata={"moves": len(rewards)},
        seed=2**62 + task,
        attempt=0,
    )


def agent_trajectory() -> TrajectoryRecord:
    """A trajectory of an agent with a branch behind its first turn, and one from a history of its own."""
    prompt, first = message("user", "how?", 0), message("assistant", "so", 1)
    timing = Timing([0.5, 0.25], [0.0, 0.0])
    record = trajectory(
        3,
        messages=[prompt, first, message("user", "really?", 1), message("assistant", "yes", 2)],
        rewards=[0.0, 1.0],
    )
    record.branches = [
        Branch([prompt, first, message("user", "or so?", 1), message("assistant", "maybe", 2)], [3], timing),
        Branch([message("user", "again: how?", 0), message("assistant", "otherwise", 1)], [1], Timing([0.5], [0.0])),
    ]
    record.continuity = {"new": 2, "clean": 2}
    return record


def failure(task: int, rollout: int = 0, *, environment: str = "puzzle", number: int = 0) -> FailureRecord:
    kind, stage, cause = _CAUSES[number % len(_CAUSES)]
    return FailureRecord(
        task_index=task,
        rollout_index=rollout,
        task_name=environment,
        idx=None,
        kind=kind,  # type: ignore[arg-type]
        stage=stage,
        cause=cause,
        tries=5,
        attempt=0,
        turn_count=0,
        seed=1,
        messages=[message("user", "hi", 0)],
    )


def dropped(task: int, rollout: int = 0, *, environment: str = "puzzle") -> DroppedRecord:
    return DroppedRecord(
        task_index=task,
        rollout_index=rollout,
        task_name=environment,
        idx=None,
        reason="oversampled",
        stop_reason=None,
        turn_count=1,
        total_reward=0.0,
        rewards=[0.0],
        tokens=TokenCounts(2, 2, 0),
        messages=[message("user", "hi", 0)],
        metadata=None,
        seed=None,
        attempt=0,
    )


def realistic(tasks: int, repeats: int = 8, *, seed: int = 0) -> Iterator[EndedRecord]:
    """A run of three environments, a group a task, with failures and dropped ones at its end."""
    chance = random.Random(seed)
    for task in range(tasks):
        skill = chance.betavariate(0.6, 0.6)
        make = (_puzzle, _math, _shell)[task % 3]
        for rollout in range(repeats):
            if chance.random() < 0.97:
                yield make(chance, task, rollout, skill)
    for number in range(max(3, tasks * repeats // 150)):
        # Rollout indexes above those of the groups: nothing of it finished.
        name = ("sliding_puzzle", "word_problems", "shell_repair")[number % 3]
        yield failure(number, repeats, environment=name, number=chance.choice([0, 0, 0, 1, 1, 2]))
    for number in range(max(2, tasks * repeats // 300)):
        yield dropped(number, repeats + 1, environment="sliding_puzzle")


def _board(chance: random.Random) -> str:
    tiles = [*"12345678", "_"]
    chance.shuffle(tiles)
    return "\n".join(" ".join(tiles[row : row + 3]) for row in (0, 3, 6))


def _puzzle(chance: random.Random, task: int, rollout: int, skill: float) -> TrajectoryRecord:
    turns = min(20, 2 + int(chance.gammavariate(3.0, 2.4)))
    solved = chance.random() < skill and turns < 20
    messages = [message("user", _PUZZLE.format(board=_board(chance)), 0)]
    for turn in range(1, turns + 1):
        move = chance.choice(["up", "down", "left", "right"])
        thought = chance.choice(
            [
                f"The gap is in the middle row, so I move the tile below it {move}.",
                f"Tile {chance.randint(1, 8)} has to go one place {move} before the first row can be finished.",
                "The last move did not help. I undo it and try the other side.",
            ]
        )
        messages.append(message("assistant", f"{thought}\n<action>{move}</action>", turn))
        end = f"Solved in {turn} turns." if solved and turn == turns else f"{20 - turn} turns are left."
        messages.append(message("environment", f"{_board(chance)}\n{end}\n", turn))
    return trajectory(
        task,
        rollout,
        environment="sliding_puzzle",
        messages=messages,
        rewards=[0.0] * (turns - 1) + [float(solved)],
        stop_reason="terminated" if solved else "max_turns" if turns == 20 else "terminated",
        seconds=[(chance.gammavariate(4, 0.18), chance.gammavariate(2, 0.0008)) for _ in range(turns)],
    )


def _math(chance: random.Random, task: int, rollout: int, skill: float) -> TrajectoryRecord:
    a, b = random.Random(task).sample(range(3, 99), 2)
    right, cut = chance.random() < skill, chance.random() < 0.08
    steps = [f"Step {step + 1}: {a} × {step + 2} = {a * (step + 2)}, which leaves {b - step}." for step in range(
        chance.randint(2, 14))]  # fmt: skip
    answer = "" if cut else f"\nThe answer is \\boxed{{{a if right else b}}}."
    return trajectory(
        task,
        rollout,
        environment="word_problems",
        messages=[
            message("system", "Reason step by step and put the final answer in \\boxed{}.", 0),
            message("user", _QUESTIONS[task % len(_QUESTIONS)].format(a=a, b=b), 0),
            message("assistant", "\n".join(steps) + answer, 1, truncated=cut),
            message("environment", "correct" if right and not cut else "not correct", 1),
        ],
        rewards=[float(right and not cut)],
        stop_reason="truncated" if cut else "terminated",
        seconds=[(chance.gammavariate(5, 0.5), chance.gammavariate(2, 0.01))],
    )


def _shell(chance: random.Random, task: int, rollout: int, skill: float) -> TrajectoryRecord:
    turns = chance.randint(3, 14)
    messages = [
        message("system", "You have a shell. One command a turn, in <sh>…</sh>; <done/> ends the episode.", 0),
        message("user", f"`make test` fails in /repo-{task % 7}. Find out why and repair it.", 0),
    ]
    rewards, seconds = [], []
    for turn in range(1, turns + 1):
        command = chance.choice(["make test 2>&1 | tail -20", "git log --oneline -5", "sed -n 1,40p src/parse.c", "ls"])
        messages.append(message("assistant", f"Let me look at what happens there.\n<sh>{command}</sh>", turn))
        failed = chance.randint(0, 12)
        output = f"$ {command}\n{failed} of 48 tests failed\nmake: *** [Makefile:12: test] Error 1\n"
        messages.append(message("tool", output, turn, truncated=turn == turns and chance.random() < 0.1))
        rewards.append(round(0.05 * (chance.random() < skill), 2))
        seconds.append((chance.gammavariate(4, 0.3), chance.gammavariate(2, 1.4)))
    rewards[-1] += round(chance.betavariate(1 + 4 * skill, 3), 2)
    ended = chance.random()
    return trajectory(
        task,
        rollout,
        environment="shell_repair",
        messages=messages,
        rewards=rewards,
        stop_reason="terminated" if ended < 0.7 else "max_turns" if ended < 0.9 else "truncated",
        seconds=seconds,
    )


START = 1_790_000_000.0
_SECONDS_OF_A_VERSION = 60.0


class WordTokenizer:
    """A tokenizer of words with the space before them; the last id has no text, like an end of turn."""

    END = 1 << 20

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        found = []
        for word in re.findall(r"\s*\S+|\s+$", text):
            if word not in self.words:
                self.words.append(word)
            found.append(self.words.index(word))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[token] for token in ids if token != self.END)


def sampled(
    records: Iterable[EndedRecord], tokenizer: WordTokenizer, *, concurrency: int = 48
) -> Iterator[EndedRecord]:
    """The records as a run would have made them: one after the other with some in flight, and weights that change."""
    chance = random.Random(7)
    free = [START] * concurrency
    for record in records:
        if isinstance(record, TrajectoryRecord):
            place = free.index(min(free))
            free[place] = _sample(record, tokenizer, chance, free[place])
        yield record


def _sample(record: TrajectoryRecord, tokenizer: WordTokenizer, chance: random.Random, begin: float) -> float:
    now = begin
    timing = record.timing
    timing.ended_at = []
    for reply in record.messages:
        if reply.role != "assistant" or reply.turn == 0:
            continue
        turn = reply.turn - 1
        ids = [*tokenizer.encode(reply.content), tokenizer.END]
        reply.token_ids = token_array(ids)
        reply.logprobs = array("f", [-chance.expovariate(1.6) if chance.random() < 0.3 else -0.01 for _ in ids])
        versions = [
            str(int((now - START + timing.generation_seconds[turn] * place / len(ids)) // _SECONDS_OF_A_VERSION))
            for place in range(len(ids))
        ]
        reply.policy_versions = [
            (version, versions.index(version), len(versions) - versions[::-1].index(version))
            for version in sorted(set(versions), key=int)
        ]
        now += timing.generation_seconds[turn] + timing.environment_seconds[turn]
        timing.ended_at.append(round(now, 3))
    replies = [reply for reply in record.messages if reply.role == "assistant" and reply.turn > 0]
    record.tokens.generated = sum(len(reply.token_ids) for reply in replies)
    return now


def store(directory: Path, records: Iterable[EndedRecord]) -> str:
    """Write records as a run; its location."""
    directory.mkdir(parents=True, exist_ok=True)
    with (
        (directory / "shard-00000.jsonl").open("ab") as finished,
        (directory / "failures.jsonl").open("ab") as failed,
        (directory / "dropped.jsonl").open("ab") as unwanted,
    ):
        for record in records:
            if isinstance(record, TrajectoryRecord):
                finished.write(encode_line(record))
            else:
                (failed if isinstance(record, FailureRecord) else unwanted).write(encode_line(record))
    return str(directory)


def report_of(
    records: Iterable[EndedRecord],
    *,
    location: str = "runs/one",
    manifest: RunManifest | None = None,
    most: int = MOST,
    most_bytes: int = MOST_BYTES,
    texts: TokenTexts | None = None,
) -> ReportData:
    """What the report of a run of these records shows."""
    observer = ReportObserver(TrajectorySample(most=most, most_bytes=most_bytes, texts=texts))
    with TemporaryDirectory() as directory:
        store(Path(directory), records)
        if manifest is not None:
            (Path(directory) / MANIFEST).write_bytes(orjson.dumps(manifest))
        return report_data(aggregate([RunFiles(directory)], observe=observer.offer), observer, location=location)
