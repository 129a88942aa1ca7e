"""Outputs of vLLM's engine that are sent in batches instead of token by token.

After each step the engine's process sends every request's token to the process of the requests, which decodes, counts
and stores it: 30 to 40 µs for each token, so that one process of Python keeps up with some 25,000 tokens a second. Who
asks for a whole response needs nothing before its end. Messages of several tokens are part of vLLM's protocol, for
speculative decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import LogprobsLists
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

# Also the precision of what replicas say of the tokens in flight.
BATCH_TOKENS = 32
"""Tokens of a request that are sent together."""

STATISTICS_SECONDS = 0.1
"""Time between two messages that have nothing but what the engine is doing at the moment."""

# What later statistics replace; the other ones count.
_GAUGES = frozenset(
    {
        "num_running_reqs",
        "num_waiting_reqs",
        "num_skipped_waiting_reqs",
        "num_kv_fetch_reqs_by_stage",
        "step_counter",
        "current_wave",
        "kv_cache_usage",
        "waiting_lora_adapters",
        "running_lora_adapters",
    }
)

# What a token of a response that goes on has; an output with anything else is sent at once.
_PLAIN = frozenset({"request_id", "new_token_ids", "new_logprobs", "trace_headers", "num_nans_in_logits"})


class OutputBuffer:
    """The outputs that wait for more tokens of their requests, in the order in which they were made.

    The first output of a request, the last one, and all that say more than tokens are sent at once. All tokens of a
    message are of one version of the weights.
    """

    def __init__(
        self,
        may_wait: Callable[[str], bool],
        *,
        tokens: int = BATCH_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`may_wait` is true for a request id if nobody reads its response before the end."""
        self._may_wait = may_wait
        self._tokens = tokens
        self._clock = clock
        self._waiting: dict[str, list[EngineCoreOutput]] = {}
        # Of all that wait: their weights, and the time of the newest.
        self._version: str | None = None
        self._timestamp = 0.0
        self._statistics_at = 0.0

    def add(self, message: EngineCoreOutputs) -> list[EngineCoreOutputs]:
        """Take the outputs of a step.

        Returns:
            The messages to be sent now, in this order. The last one is `message` itself, changed, unless nothing of it
            is left.
        """
        messages = []
        if self._waiting and message.weight_version != self._version:
            messages.append(self._all())
        if message.outputs:
            message.outputs = list(self._due(message))
        if not self._is_empty(message):
            messages.append(message)
        return messages

    def forget(self, known: Callable[[str], bool]) -> None:
        """Drop what waits for requests that are not known any more, because they were aborted."""
        self._waiting = {request: outputs for request, outputs in self._waiting.items() if known(request)}

    def __len__(self) -> int:
        """Number of requests with outputs that wait."""
        return len(self._waiting)

    def _all(self) -> EngineCoreOutputs:
        from vllm.v1.engine import EngineCoreOutputs

        outputs = [_joined(outputs) for outputs in self._waiting.values()]
        self._waiting.clear()
        return EngineCoreOutputs(outputs=outputs, timestamp=self._timestamp, weight_version=self._version)

    def _due(self, message: EngineCoreOutputs) -> Iterator[EngineCoreOutput]:
        for output in message.outputs:
            waiting = self._waiting.get(output.request_id)
            if _is_plain(output) and self._may_wait(output.request_id):
                self._version, self._timestamp = message.weight_version, message.timestamp
                if waiting is None:
                    self._waiting[output.request_id] = [output]
                    continue
                waiting.append(output)
                if len(waiting) < self._tokens:
                    continue
                yield _joined(self._waiting.pop(output.request_id))
            elif waiting is None:
                yield output
            else:
                waiting.append(output)
                yield _joined(self._waiting.pop(output.request_id))

    def _is_empty(self, message: EngineCoreOutputs) -> bool:
        if message.outputs or any(
            value is not None
            for value in (
                message.utility_output,
                message.finished_requests,
                message.wave_complete,
                message.start_wave,
            )
        ):
            return False
        statistics = message.scheduler_stats
        if statistics is None:
            return True
        now = self._clock()
        if now - self._statistics_at < STATISTICS_SECONDS and not _counts(statistics):
            return True
        self._statistics_at = now
        return False


def _is_plain(output: EngineCoreOutput) -> bool:
    return all(getattr(output, name) is None for name in _telling_fields())


@functools.cache
def _telling_fields() -> tuple[str, ...]:
    from vllm.v1.engine import EngineCoreOutput

    return tuple(name for name in EngineCoreOutput.__struct_fields__ if name not in _PLAIN)


def _joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """One output of several of a request; it is the last one with the tokens of all."""
    last = outputs[-1]
    if len(outputs) > 1:
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        last.new_logprobs = _joined_logprobs([part.new_logprobs for part in outputs if part.new_logprobs is not None])
    return last


def _joined_logprobs(parts: list[LogprobsLists]) -> LogprobsLists | None:
    if not parts:
        return None
    import numpy as np

    # A step has as many columns as its most curious request asked for: each has at least those of this one.
    width = min(part.logprobs.shape[1] for part in parts)
    return parts[0]._replace(
        logprob_token_ids=np.concatenate([part.logprob_token_ids[:, :width] for part in parts]),
        logprobs=np.concatenate([part.logprobs[:, :width] for part in parts]),
        sampled_token_ranks=np.concatenate([part.sampled_token_ranks for part in parts]),
    )


def _counts(statistics: SchedulerStats) -> bool:
    return any(getattr(statistics, name) != value for name, value in _no_counts())


@functools.cache
def _no_counts() -> tuple[tuple[str, Any], ...]:
    from vllm.v1.metrics.stats import SchedulerStats

    nothing = SchedulerStats()
    return tuple(
        (field.name, getattr(nothing, field.name))
        for field in dataclasses.fields(SchedulerStats)
        if field.name not in _GAUGES
    )
