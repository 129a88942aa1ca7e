"""A trajectory that was interrupted goes on only under what began it; any other prompt is one of its own."""

from __future__ import annotations

import dataclasses
from array import array
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.chat_template import compiled, stopped_clock
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.prompts import Prompt, Sample, prompt_messages
from kuberoll_workers.data.provenance import rendering_of
from kuberoll_workers.data.record import Partial, TrajectoryRecord, TurnRecord, decode_line, encode_line
from kuberoll_workers.data.sampling import distribution_of, resolved
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.policy.interface import GenerationResult, SamplingParameters
from kuberoll_workers.rollouts.trajectory import Trajectory
from tests.rollouts.fakes import settings

TEMPLATES = [
    '{{ strftime_now("%d %b %Y") }} {{ messages[0].content }}>',
    "{{ messages[0].content }}>",
    "{{ messages[0].content }}",
]
MOMENTS = [datetime(2026, 2, 28, 23, 59, tzinfo=UTC), datetime(2026, 3, 1, 0, 1, tzinfo=UTC)]


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """What one life of a run renders and samples with."""
    return {
        "template": draw(st.sampled_from(TEMPLATES)),
        "moment": draw(st.sampled_from(MOMENTS)),
        "sources": {"model": draw(st.sampled_from(["commit a", "commit b"]))},
        "sampling": draw(st.sampled_from([{}, {"temperature": 0.3}])),
    }


def begun(life: dict[str, Any], partial: Partial | None) -> Trajectory:
    chat = [{"role": "user", "content": "Which day is it?"}]
    text = compiled(life["template"]).render(messages=chat, strftime_now=stopped_clock(life["moment"]))
    ids = array("i", map(ord, text))
    prompt = Prompt(
        task_index=0, task_name="a", idx=None, messages=tuple(prompt_messages(chat, ids)), token_ids=ids, metadata=None,
        stop_strings=None, sampling=life["sampling"],
    )  # fmt: skip
    sample = Sample(prompt=prompt, rollout_index=0, seed=1, partial=partial)
    return Trajectory(sample, settings(rendering=rendering_of(life["sources"], clock=None)))


def take_turns(trajectory: Trajectory, count: int) -> list[TurnRecord]:
    turns = []
    for _ in range(count):
        response = GenerationResult(token_ids=array("i", [7]), logprobs=array("f", [-1.0]), finish_reason="stop")
        trajectory.add_response(response, "x", 0.0)
        step = StepOutcome(
            role="environment", content="y", metadata=None, stop_strings=None, reward=0.0, terminated=False
        )
        trajectory.add_step(step, array("i", [8]), 0.0)
        turns.append(decode_line(encode_line(trajectory.turn_record()), TurnRecord, where=""))
    return turns


@given(one=runs(), two=runs(), count=st.integers(1, 3), older=st.booleans())
def test_stored_turns_follow_the_prompt_that_they_were_sampled_under(
    one: dict[str, Any], two: dict[str, Any], count: int, older: bool
) -> None:
    first = begun(one, None)
    turns = take_turns(first, count)
    if older:
        # As an older version stored it.
        turns[0].prompt = None
    again = begun(two, Partial(turns))
    same = first.sample.prompt.token_ids == again.sample.prompt.token_ids and all(
        one[name] == two[name] for name in ("sources", "sampling")
    )
    assert again.complete_turns == (count if same and not older else 0)
    if again.complete_turns:
        assert again.context == first.context
    else:
        assert again.context == again.sample.prompt.token_ids


@given(
    usual=st.sampled_from([{}, {"temperature": 0.7, "top_p": 0.9}]),
    row=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.3, 0.7]),
            "top_p": st.sampled_from([0.9, 1.0]),
            "top_k": st.sampled_from([-1, 0, 5]),
            "greedy": st.booleans(),
            "max_tokens": st.integers(1, 9),
            "stop": st.just(["x"]),
        },
    ),
    count=st.integers(1, 3),
)
def test_a_record_says_of_each_response_how_it_was_sampled(
    usual: dict[str, Any], row: dict[str, Any], count: int
) -> None:
    """Against the requests that were really made."""
    job = SamplingParameters(max_tokens=9, **usual)
    made = settings(sampling=job, usual=distribution_of(job), max_turns=count)
    prompt = Prompt(
        task_index=0, task_name="a", idx=None, messages=(Message("user", "x", array("i", [1])),),
        token_ids=array("i", [1]), metadata=None, stop_strings=None, sampling=row,
    )  # fmt: skip
    trajectory = Trajectory(Sample(prompt=prompt, rollout_index=0, seed=1), made)
    requested = []
    for _ in range(count):
        requested.append(distribution_of(trajectory.next_request(0).sampling))
        take_turns(trajectory, 1)
    record = decode_line(encode_line(trajectory.record()), TrajectoryRecord, where="")
    assert record.sampling is None or any(found is not None for found in record.sampling)
    assert resolved(record.sampling, count, made.usual) == requested
    assert (record.sampling is None) == all(found == made.usual for found in requested)
    # Those of another part of the run, which was forced, refer to the same manifest.
    older = Trajectory(Sample(prompt=prompt, rollout_index=0, seed=1), dataclasses.replace(made, usual=None))
    take_turns(older, count)
    assert older.record().sampling == requested
