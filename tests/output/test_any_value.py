"""Whatever an environment returns or raises: every line that is written is read back as it was meant."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import tempfile
from array import array
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.plain import MAX_MESSAGE
from kuberoll_workers.data.record import (
    FailureRecord,
    Unstorable,
    decode_line,
    encode_line,
    failure_to_store,
)
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.output import records
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RetryPolicy
from tests.data.test_plain import same
from tests.examples import examples
from tests.output.support import dropped, failure, record, store_at, turn
from tests.rollouts.fakes import rollout_of, runners, sample
from tests.values import anything, texts


class Whatever:
    """The second of four rows gets what the test made up; what it raises, where it raises something."""

    def __init__(self, made: EnvironmentReturn, raised: BaseException | None) -> None:
        self._made = made
        self._raised = raised
        self.good = EnvironmentReturn([{"role": "environment", "content": "c"}], [{"n": 0}], None, [1.0], [True])

    def step(self, logs: list[Any], metadata: list[Any]) -> Any:
        if any(state["bad"] for state in metadata):
            if self._raised is not None:
                raise self._raised
            return self._made if len(logs) == 1 else None
        good: Any = [None if column is None else column * len(logs) for column in self.good]
        return EnvironmentReturn(*good)


errors = st.one_of(
    st.none(),
    st.builds(ValueError, anything),
    st.builds(KeyError, texts),
    st.builds(SystemExit, anything),
    st.sampled_from([StopIteration(), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()]),
)

returns = st.builds(
    EnvironmentReturn,
    st.just([{"role": "environment", "content": "c"}])
    | st.lists(st.fixed_dictionaries({"role": anything, "content": texts}), min_size=1, max_size=1),
    st.lists(st.one_of(st.dictionaries(texts, anything, max_size=3), anything), min_size=1, max_size=1),
    st.one_of(st.none(), st.lists(anything, min_size=1, max_size=1)),
    st.one_of(
        st.lists(st.one_of(st.floats(), anything), min_size=1, max_size=1),
        st.dictionaries(texts, st.lists(st.floats(), min_size=1, max_size=1), max_size=3),
        anything,
    ),
    st.one_of(st.just([True]), anything),
    st.one_of(st.none(), st.lists(anything, min_size=1, max_size=1)),
)


async def _play(made: EnvironmentReturn, raised: BaseException | None, place: Path) -> None:
    store = store_at(place)
    samples = [sample(index, metadata={"bad": index == 1}) for index in range(4)]
    async with runners({"env": Whatever(made, raised)}) as environments:
        rollout = rollout_of(
            environments, turn_sink=store.turn, retries=RetryPolicy(backoff_seconds=0, environment_attempts=1)
        )
        await run_rollout(rollout, samples, store.result)
    await store.close()


@settings(max_examples=examples(150), deadline=None)
@given(made=returns, raised=errors)
def test_every_line_is_read_back_and_no_other_trajectory_is_harmed(
    made: EnvironmentReturn, raised: BaseException | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_play(made, raised, Path(directory)))
        storage = DirectoryStorage(Path(directory))
        lines = [line for name in ("shard-00000", records.FAILURES) for _, line in storage.lines(name)]
        stored = {item.task_index: item for item in records.trajectories(storage, "shard-00000")}
        failed = list(records.failures(storage))
        assert len(lines) == len(stored) + len(failed) == 4
        assert {0, 2, 3} <= stored.keys()
        if 1 not in stored:
            assert (failed[0].task_index, failed[0].kind) == (1, "environment")
            assert 0 < len(failed[0].cause) <= 7 * MAX_MESSAGE
            assert failed[0].metadata == {"bad": True}
            return
        bad = stored[1]
        assert raised is None
        assert made.metadata is not None
        assert same(made.metadata[0], bad.metadata) or made.metadata[0] is None
        assert numpy.isfinite(numpy.float32(bad.total_reward))
        if not isinstance(made.rewards, dict) and isinstance(made.rewards[0], float):
            assert bad.rewards == [made.rewards[0]]
        assert bad.messages[-1].content == made.observations[0]["content"]


def _changed(make: Any, fields: dict[str, Any]) -> Any:
    made = make(0)
    return dataclasses.replace(made, **{name: value for name, value in fields.items() if hasattr(made, name)})


@settings(max_examples=examples(300), deadline=None)
@given(
    make=st.sampled_from([record, failure, dropped]),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "metadata": st.dictionaries(texts, anything, max_size=3),
            "idx": anything,
            "total_reward": st.floats(),
            "rewards": st.lists(st.floats(), max_size=3),
            "reward_parts": st.dictionaries(texts, st.lists(st.floats(), max_size=2), max_size=2),
            "cause": texts,
            "answer": texts,
            "seed": st.integers(),
            "messages": st.lists(
                st.builds(
                    Message,
                    texts,
                    texts,
                    st.just(token_array([1, 2])),
                    st.none()
                    | st.lists(st.floats(width=32), min_size=2, max_size=2).map(lambda values: array("f", values)),
                    turn=st.integers(0, 2),
                    sampled=st.booleans(),
                ),
                max_size=2,
            ),
        },
    ),
)
def test_encoding_refuses_what_decoding_could_not_give_back(make: Any, fields: dict[str, Any]) -> None:
    made = _changed(make, fields)
    kind = type(made)
    try:
        line = encode_line(made)
    except Unstorable as error:
        instead = failure_to_store(made, error)
        read = decode_line(encode_line(instead), FailureRecord, where="t")
        assert read.key == made.key
        assert "it cannot be stored" in read.cause
        return
    read = decode_line(line, kind, where="t")
    for message, other in zip(made.messages, read.messages, strict=True):
        assert (other.role, other.content, list(other.token_ids)) == (
            message.role,
            message.content,
            [*message.token_ids],
        )
        assert (other.turn, other.sampled) == (message.turn, message.sampled)
        # Log-probabilities are float32, written in the shortest form that gives them back.
        assert (other.logprobs and array("f", other.logprobs)) == message.logprobs
    for name in ("total_reward", "rewards", "reward_parts", "cause", "answer"):
        if hasattr(made, name):
            assert getattr(read, name) == getattr(made, name)
    assert made.metadata is None or same(made.metadata, read.metadata)
    assert same(made.idx, read.idx)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"total_reward": math.inf}, "total_reward: found float inf; it must be a finite number"),
        ({"total_reward": 10**5000}, "total_reward: found int .*; it must be a finite number"),
        ({"rewards": [1.0, math.nan]}, "rewards: found float nan"),
        ({"reward_parts": {"a": [None]}}, "reward_parts.a: found NoneType None"),
        ({"metadata": {"n": [math.nan]}}, r"metadata\.n\[0\] is nan"),
        ({"idx": {1, 2}}, "idx is set"),
        ({"answer": "\ud800"}, "surrogates not allowed"),
        ({"seed": 2**70}, "64-bit"),
        ({"messages": [Message("user", "x", token_array([1]), array("f", [math.nan]))]}, r"messages\[0\]\.logprobs"),
        (
            {"messages": [Message("assistant", "x", token_array([1]), turn=1)]},
            r"messages\[0\], of turn 1 and role 'assistant', is not marked as sampled",
        ),
        ({"messages": [Message("user", "x", token_array([1]), sampled=True)]}, r"messages\[0\].*is marked as sampled"),
        ({"messages": [Message(None, "x", token_array([1]))]}, r"messages\[0\]: its role"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Unstorable, match=rf"trajectory \(3, 0\): .*{words}"):
        encode_line(record(3, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": math.nan}, "reward or seconds: found float nan"),
        ({"environment_seconds": math.inf}, "reward or seconds: found float inf"),
        ({"ended_at": math.nan}, "ended_at: found float nan"),
        ({"ended_at": ""}, "ended_at: found str ''"),
        ({"reward_parts": {"a": None}}, "reward_parts: found None"),
    ],
)
def test_what_is_wrong_in_a_turn_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Unstorable, match=rf"trajectory \(3, 0\): .*{words}"):
        encode_line(dataclasses.replace(turn(3), **changes))


async def test_a_record_that_no_line_can_hold_is_stored_as_a_failure(tmp_path: Path) -> None:
    told: list[Any] = []
    store = store_at(tmp_path, turns=None, stored=told.append)
    bad = Message("\ud800", "\ud801", token_array([1]))
    await store.result(record(0))
    await store.result(record(1, total_reward=math.inf))
    await store.result(failure(2, metadata={"n": math.nan}, cause="\ud800", messages=[bad]))
    await store.result(dropped(3, metadata={"n": {1}}))
    await store.result(failure(4, idx={1: 2}))
    await store.close()
    storage = DirectoryStorage(tmp_path)
    assert [item.task_index for item in records.trajectories(storage, "shard-00000")] == [0]
    assert not list(records.dropped(storage))
    found = {item.task_index: item for item in records.failures(storage)}
    assert (set(found), len(told)) == ({1, 2, 3, 4}, 5)
    assert (found[1].kind, found[1].stage) == ("environment", "trajectory")
    assert found[1].cause.startswith("it cannot be stored: trajectory (1, 0): total_reward: found float inf")
    assert (found[2].kind, found[2].stage, found[2].metadata) == ("infrastructure", "generation", None)
    assert found[2].cause.startswith("\\ud800 (it cannot be stored")
    assert (found[2].messages[0].role, found[2].messages[0].content) == ("\\ud800", "\\ud801")
    assert found[4].idx is None
