"""The modelled engine: tokens are conserved, the cache never overflows, nothing starves, and leaps change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.simulation.engine_model import EngineLimits, EngineModel, RequestTooLong, Sequence
from tests.examples import examples

MILLISECOND = 1_000_000


def limits(**changes: Any) -> EngineLimits:
    values: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "kv_cache_tokens": 160,
        "block_tokens": 8,
        "step_seconds": 0.01,
        "decode_seconds": 0.001,
        "prefill_seconds": 0.0001,
    }
    return EngineLimits(**{**values, **changes})


def sequence(prompt: int, wanted: int, *, trajectory: int = 0, group: int = 0, common: int = 0) -> Sequence:
    return Sequence(trajectory=trajectory, group=group, common=common, prompt=prompt, wanted=wanted)


def check(engine: EngineModel) -> None:
    """Blocks are held, free or blank, each once."""
    cache = engine.cache
    assert cache.blank >= 0
    assert cache.evictable >= 0
    assert 0 <= cache.used <= cache.capacity
    assert cache.evictable == sum(cache._idle.values())
    held = sum(item.held.private for item in engine._running.values() if item.state == "filling")
    size = cache.block_tokens
    for item in engine._running.values():
        if item.state == "generating":
            held += -(-(item.offset + engine._decode_steps) // size) - item.held.shared
    held += sum(common.blocks for common in cache._common.values() if common.holders)
    if not engine.busy:
        assert cache.used == held


def drained(engine: EngineModel, events: list[tuple[int, Sequence]]) -> list[tuple[int, int]]:
    """Submit requests at their times and take all steps; ends of the requests, `(trajectory, time)`."""
    ends: list[tuple[int, int]] = []
    pending = sorted(events, key=lambda event: event[0])
    turns = 0
    while pending or engine.next_ns is not None:
        turns += 1
        assert turns < 100_000, "it does not end"
        due = engine.next_ns
        now = due if due is not None and (not pending or due <= pending[0][0]) else pending[0][0]
        while pending and pending[0][0] == now:
            engine.submit(pending.pop(0)[1], now)
        ends += [(item.held.trajectory, now) for item in engine.advance(now)]
        check(engine)
    return ends


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    """Requests: time, prompt, tokens to generate, group, common prompt."""
    count = draw(st.integers(1, 12))
    requests = []
    for _ in range(count):
        prompt = draw(st.integers(1, 100))
        requests.append(
            (
                draw(st.integers(0, 400)) * MILLISECOND,
                prompt,
                draw(st.integers(1, 60)),
                draw(st.integers(0, 3)),
                draw(st.integers(0, prompt)),
            )
        )
    return requests


def events(workload: list[tuple[int, int, int, int, int]]) -> list[tuple[int, Sequence]]:
    # Members of a group share the shortest of their common prompts.
    common: dict[int, int] = {}
    for _, _, _, group, shared in workload:
        common[group] = min(shared, common.get(group, shared))
    return [
        (at, sequence(prompt, wanted, trajectory=number, group=group, common=common[group]))
        for number, (at, prompt, wanted, group, _) in enumerate(workload)
    ]


@settings(max_examples=examples(400))
@given(workloads(), st.sampled_from([160, 240, 1600]), st.sampled_from([5, 32, 100, 0]), st.booleans())
def test_every_request_gets_its_tokens_and_every_block_is_given_back(
    workload: list[tuple[int, int, int, int, int]], cache: int, budget: int, reuse: bool
) -> None:
    """A budget of 0 stands for whole prompts."""
    engine = EngineModel(
        limits(
            kv_cache_tokens=cache,
            max_num_batched_tokens=budget or 160,
            prefix_caching=reuse,
            chunked_prefill=budget > 0,
        )
    )
    ends = drained(engine, events(workload))
    assert sorted(number for number, _ in ends) == list(range(len(workload)))
    tally = engine.tally
    assert tally.generated == sum(wanted for _, _, wanted, _, _ in workload)
    assert tally.prompted == sum(prompt for _, prompt, _, _, _ in workload)
    # A prompt that is preempted half way is counted as recomputed from its beginning.
    assert tally.prefilled <= tally.prompted - tally.cached + tally.recomputed
    if not tally.preemptions:
        assert tally.prefilled == tally.prompted - tally.cached
    assert engine.cache.used == 0
    assert reuse or not tally.cached


@settings(max_examples=examples(300))
@given(
    workloads(),
    st.sampled_from([160, 240, 1600]),
    st.sampled_from([5, 32, 100]),
    st.sampled_from([0.0, 0.000_03, 3.3e-9]),
    st.booleans(),
)
def test_steps_that_are_taken_together_end_as_one_by_one(
    workload: list[tuple[int, int, int, int, int]], cache: int, budget: int, attention: float, chunks: bool
) -> None:
    given_limits = limits(
        kv_cache_tokens=cache,
        max_num_batched_tokens=budget if chunks else cache,
        attention_seconds=attention,
        chunked_prefill=chunks,
    )
    together, alone = EngineModel(given_limits), EngineModel(given_limits, leap=False)
    assert drained(together, events(workload)) == drained(alone, events(workload))
    assert together.tally == alone.tally


@settings(max_examples=examples(200))
@given(workloads())
def test_requests_begin_in_the_order_in_which_they_come(workload: list[tuple[int, int, int, int, int]]) -> None:
    requests = events(workload)
    drained(EngineModel(limits()), requests)
    # At one time they come in the order of the list.
    began = [item.started_ns for _, item in sorted(requests, key=lambda event: event[0])]
    assert began == sorted(began)


@settings(max_examples=examples(200))
@given(workloads(), st.lists(st.tuples(st.integers(0, 600), st.integers(0, 200), st.booleans()), max_size=4))
def test_pauses_lose_nothing(
    workload: list[tuple[int, int, int, int, int]], pauses: list[tuple[int, int, bool]]
) -> None:
    engine = EngineModel(limits())
    pending = [(at, request, None) for at, request in events(workload)]
    stops = [(at * MILLISECOND, None, (length * MILLISECOND, clear)) for at, length, clear in pauses]
    ended = 0
    for at, request, pause in sorted([*pending, *stops], key=lambda event: event[0]):
        while (due := engine.next_ns) is not None and due < at:
            ended += len(engine.advance(due))
        if request is not None:
            engine.submit(request, at)
        elif pause is not None:
            engine.pause(at, at + pause[0], clear=pause[1])
        ended += len(engine.advance(at))
        check(engine)
    while (due := engine.next_ns) is not None:
        ended += len(engine.advance(due))
    assert ended == len(workload)
    assert engine.tally.generated == sum(wanted for _, _, wanted, _, _ in workload)
    assert engine.cache.used == 0


def test_whole_prompts_wait_for_a_step_that_has_room_for_them() -> None:
    engine = EngineModel(limits(kv_cache_tokens=1600, max_num_batched_tokens=50, chunked_prefill=False))
    items = [sequence(30, 1, trajectory=number, group=number) for number in range(3)]
    ends = drained(engine, [(0, item) for item in items])
    assert [end for _, end in ends] == [step * 13 * MILLISECOND for step in (1, 2, 3)]
    with pytest.raises(RequestTooLong, match=r"max_num_batched_tokens \(50\)"):
        engine.submit(sequence(45, 7), 0)


def test_each_step_reads_the_contexts_of_all_that_generate() -> None:
    engine = EngineModel(limits(kv_cache_tokens=1600, attention_seconds=0.000_01))
    ends = drained(engine, [(0, sequence(10, 4)), (0, sequence(20, 4, trajectory=1, group=1))])
    # The prompts in one step; then three steps of both, which read 30, 32 and 34 tokens.
    assert ends[0][1] == 13 * MILLISECOND + 3 * 12 * MILLISECOND + (30 + 32 + 34) * 10_000


def test_costs_below_a_nanosecond_count() -> None:
    engine = EngineModel(limits(kv_cache_tokens=160_000, max_num_batched_tokens=100_000, attention_seconds=4e-10))
    [(_, end)] = drained(engine, [(0, sequence(50_000, 3))])
    # The two steps after the prompt read 50,000 and 50,001 tokens: 40,000.4 ns, at the nanosecond after it.
    assert end == 10 * MILLISECOND + 50_000 * 100_000 + 2 * 11 * MILLISECOND + 40_001


def test_a_request_alone_takes_its_equation() -> None:
    engine = EngineModel(limits(kv_cache_tokens=1600, max_num_batched_tokens=32))
    [(_, end)] = drained(engine, [(0, sequence(70, 11))])
    # Three chunks of the prompt, the last of which samples the first token; then ten steps.
    assert end == 13 * 10 * MILLISECOND + 70 * 100_000 + 10 * MILLISECOND


def test_the_next_turn_finds_all_whole_blocks_of_the_one_before() -> None:
    engine = EngineModel(limits(kv_cache_tokens=1600))
    drained(engine, [(0, sequence(20, 10))])
    # Of 30 tokens the last one has no keys and values: three whole blocks of 8.
    again = sequence(40, 5)
    drained(engine, [(10**10, again)])
    assert again.cached == 24


def test_a_group_computes_its_prompt_once() -> None:
    engine = EngineModel(limits(kv_cache_tokens=1600, max_num_batched_tokens=100))
    group = [sequence(41, 3, trajectory=number, group=7, common=41) for number in range(4)]
    drained(engine, [(0, item) for item in group])
    assert [item.cached for item in group] == [0, 40, 40, 40]


def test_the_prefix_that_was_used_the_longest_time_ago_goes_first_and_from_its_end() -> None:
    engine = EngineModel(limits(kv_cache_tokens=160))
    second = 10**9
    for number in range(3):
        # Six whole blocks each, of twenty.
        drained(engine, [(number * second, sequence(48, 1, trajectory=number, group=number))])
    # Five blocks, of which two are blank.
    drained(engine, [(3 * second, sequence(40, 1, trajectory=3, group=3))])
    again = [sequence(49, 1, trajectory=number, group=number) for number in (2, 1, 0)]
    for number, item in enumerate(again):
        drained(engine, [((4 + number) * second, item)])
    assert [item.cached for item in again[:2]] == [48, 48]
    assert again[2].cached < 48


def test_a_full_cache_preempts_the_newest_and_computes_it_again() -> None:
    engine = EngineModel(limits(kv_cache_tokens=80, prefix_caching=False))
    ends = drained(engine, [(0, sequence(30, 20)), (0, sequence(30, 20, trajectory=1, group=1))])
    assert engine.tally.preemptions == 1
    assert [number for number, _ in ends] == [0, 1]
    assert engine.tally.recomputed > 30


def test_weights_clear_the_cache_and_what_runs_is_computed_again() -> None:
    engine = EngineModel(limits(kv_cache_tokens=1600))
    item = sequence(20, 10)
    engine.submit(item, 0)
    engine.advance(0)
    engine.pause(30 * MILLISECOND, 500 * MILLISECOND, clear=True)
    assert drained(engine, [])[0][1] > 500 * MILLISECOND
    assert engine.tally.recomputed > 20
    assert engine.tally.generated == 10


def test_a_request_that_can_never_run_is_refused() -> None:
    engine = EngineModel(limits(kv_cache_tokens=80))
    with pytest.raises(RequestTooLong, match=r"does not fit into kv_cache_tokens.*\(80\)"):
        engine.submit(sequence(70, 12), 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 3),
        ("kv_cache_tokens", 4),
        ("decode_seconds", -1.0),
        ("attention_seconds", -1.0),
        ("step_seconds", 0.0),
        ("step_seconds", float("inf")),
        ("prefill_seconds", float("nan")),
    ],
)
def test_limits_that_make_no_engine_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        limits(**{name: value})
