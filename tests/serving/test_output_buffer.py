"""What passes through the buffer is to vLLM's own output processor what the engine said token by token."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

from kuberoll_workers.serving.engines.core_process import BufferedQueue
from kuberoll_workers.serving.engines.output_buffer import OutputBuffer

pytestmark = pytest.mark.slow


class Plan(NamedTuple):
    """A request: in which step it begins, how many tokens it gets, and who reads it."""

    begin: int
    tokens: int
    whole: bool
    logprobs: int


plans = st.lists(
    st.builds(
        Plan, begin=st.integers(0, 6), tokens=st.integers(1, 12), whole=st.booleans(), logprobs=st.integers(0, 2)
    ),
    min_size=1,
    max_size=6,
)


def steps(asked: list[Plan], changes: set[int]) -> list[EngineCoreOutputs]:
    """The messages of an engine that plays these requests; before some steps the weights change."""
    messages, version = [], 0
    for step in range(24):
        version += step in changes
        outputs = []
        columns = 1 + max(plan.logprobs for plan in asked)
        for number, plan in enumerate(asked):
            place = step - plan.begin
            if not 0 <= place < plan.tokens:
                continue
            token = 100 * number + place
            outputs.append(
                EngineCoreOutput(
                    request_id=str(number),
                    new_token_ids=[token],
                    # As many columns as the most curious request of the step asks for.
                    new_logprobs=LogprobsLists(
                        np.array([[token, *range(columns - 1)]], np.int32),
                        np.array([[-float(token), *[-9.0] * (columns - 1)]], np.float32),
                        np.array([1], np.int32),
                    ),
                    prefill_stats=PrefillStats(num_prompt_tokens=3, num_cached_tokens=2) if place == 0 else None,
                    finish_reason=FinishReason.LENGTH if place == plan.tokens - 1 else None,
                )
            )
        if outputs:
            messages.append(EngineCoreOutputs(outputs=outputs, timestamp=1.0 + step, weight_version=str(version)))
    return messages


def results(asked: list[Plan], messages: list[EngineCoreOutputs]) -> dict[str, list[Any]]:
    """What vLLM's processor tells each caller, streams joined to one response."""
    processor = OutputProcessor(None, log_stats=False)
    collectors = {
        str(number): RequestOutputCollector(RequestOutputKind.CUMULATIVE, str(number)) for number in range(len(asked))
    }
    for number, plan in enumerate(asked):
        processor.add_request(
            EngineCoreRequest(
                request_id=str(number), external_req_id=str(number), prompt_token_ids=[1, 2, 3], mm_features=None,
                pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
                sampling_params=SamplingParams(
                    max_tokens=100, logprobs=plan.logprobs, flat_logprobs=True, detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY if plan.whole else RequestOutputKind.CUMULATIVE,
                ),
            ),
            None,
            queue=collectors[str(number)],
        )  # fmt: skip
    for message in messages:
        processor.process_outputs(message.outputs, message.timestamp, None, weight_version=message.weight_version)
    assert not processor.has_unfinished_requests()
    return {name: told(collector.get_nowait()) for name, collector in collectors.items()}


def told(output: Any) -> list[Any]:
    assert isinstance(output, RequestOutput)
    assert output.finished
    one = output.outputs[0]
    flat: Any = one.logprobs
    return [
        list(one.token_ids), [flat.logprobs[start] for start in flat.start_indices], one.finish_reason,
        output.num_cached_tokens, [(span.version, span.start, span.end) for span in one.weight_versions or ()],
    ]  # fmt: skip


@given(plans, st.sets(st.integers(0, 23)), st.integers(1, 5))
def test_every_caller_is_told_the_same(asked: list[Plan], changes: set[int], tokens: int) -> None:
    buffer = OutputBuffer(lambda request: asked[int(request)].whole, tokens=tokens)
    sent = [part for message in steps(asked, changes) for part in buffer.add(message)]
    assert len(buffer) == 0
    assert results(asked, sent) == results(asked, steps(asked, changes))


@given(plans, st.integers(2, 5))
def test_streams_do_not_wait_and_others_not_for_long(asked: list[Plan], tokens: int) -> None:
    buffer = OutputBuffer(lambda request: asked[int(request)].whole, tokens=tokens)
    made = dict.fromkeys(map(str, range(len(asked))), 0)
    sent = dict(made)
    for message in steps(asked, set()):
        for output in message.outputs:
            made[output.request_id] += 1
        for part in buffer.add(message):
            for output in part.outputs:
                sent[output.request_id] += len(output.new_token_ids)
        for name, plan in enumerate(asked):
            behind = made[str(name)] - sent[str(name)]
            assert behind == 0 if not plan.whole or made[str(name)] in (0, 1, plan.tokens) else behind < tokens


def message(*outputs: EngineCoreOutput, **fields: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=list(outputs), weight_version="0", **fields)


def token(request: str, number: int = 7, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request, new_token_ids=[number], **fields)


def test_whole_responses_cost_a_message_for_each_batch_of_tokens() -> None:
    buffer = OutputBuffer(lambda _: True, tokens=32)
    sent = [part for _ in range(320) for part in buffer.add(message(*(token(str(request)) for request in range(64))))]
    assert len(sent) == 10
    assert all(len(part.outputs) == 64 for part in sent)


def test_requests_that_were_aborted_leave_nothing() -> None:
    buffer = OutputBuffer(lambda _: True)
    buffer.add(message(token("a"), token("b")))
    buffer.forget({"b"}.__contains__)
    assert len(buffer) == 1
    last = buffer.add(message(token("b", 8, finish_reason=FinishReason.ABORT)))
    assert [output.new_token_ids for output in last[0].outputs] == [[7, 8]]
    assert len(buffer) == 0


def clock(times: list[float]) -> Callable[[], float]:
    return iter(times).__next__


def test_statistics_that_count_are_never_left_out_and_the_others_are_not_sent_with_each_step() -> None:
    buffer = OutputBuffer(lambda _: True, clock=clock([1.0, 1.01, 1.02, 1.2]))

    def sent(statistics: SchedulerStats) -> int:
        return len(buffer.add(message(token("a"), scheduler_stats=statistics)))

    counted = SchedulerStats()
    counted.prefix_cache_stats.record(num_tokens=64, num_hits=32, preempted=False)
    assert [sent(SchedulerStats(num_running_reqs=1)), sent(SchedulerStats(num_running_reqs=2)), sent(counted)] == [
        1,
        0,
        1,
    ]
    assert sent(SchedulerStats(num_running_reqs=3)) == 1


def test_answers_and_messages_for_others_pass_in_their_order() -> None:
    following: queue.Queue[Any] = queue.Queue()
    parameters = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    requests: Any = {"a": SimpleNamespace(sampling_params=parameters)}
    buffered = BufferedQueue(following, requests)
    buffered.put_nowait((0, message(token("a", 1))))
    answer = EngineCoreOutputs(utility_output=UtilityOutput(call_id=1))
    buffered.put_nowait((0, answer))
    buffered.put_nowait((-1, EngineCoreOutputs()))
    buffered.put_nowait(b"ENGINE_CORE_DEAD")
    found = [following.get_nowait() for _ in range(following.qsize())]
    # The answer may be that to a change of weights: what they made before it is told before it.
    assert [output.new_token_ids for output in found[0][1].outputs] == [[1]]
    assert found[1] == (0, answer)
    assert [item if isinstance(item, bytes) else item[0] for item in found[2:]] == [-1, b"ENGINE_CORE_DEAD"]


def test_requests_with_stop_strings_and_streams_do_not_wait() -> None:
    following: queue.Queue[Any] = queue.Queue()
    requests: Any = {
        "stop": SimpleNamespace(
            sampling_params=SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, stop=["x"], detokenize=True)
        ),
        "stream": SimpleNamespace(sampling_params=SamplingParams(output_kind=RequestOutputKind.DELTA)),
        "pooling": SimpleNamespace(sampling_params=None),
    }
    buffered = BufferedQueue(following, requests)
    for name in (*requests, "aborted"):
        buffered.put_nowait((0, message(token(name))))
    assert following.qsize() == 4
