"""A model of an engine with continuous batching, as vLLM's scheduler works: pure, with the time as an argument.

A step takes one token of each sequence that generates, and prompts in chunks of what is left of the step's token
budget. It lasts a fixed time, and more for each sequence, for each token of its context and for each prompt token.
Sequences are admitted first come, first served, when the cache has room for their whole prompt; where it has none for
the next tokens, the newest sequence is preempted, and computed again later. Costs are whole picoseconds, and an engine
is asked at whole nanoseconds, so that sums do not depend on their order.

Steps in which nothing changes but the lengths are taken together, which makes no difference to the result.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from kuberoll_workers.simulation.kv_cache import Held, KvCache

NANOSECONDS: Final = 1_000_000_000
PICOSECONDS: Final = 1_000_000_000_000
_PICO: Final = PICOSECONDS // NANOSECONDS

MOST_SECONDS: Final = 1e6
"""Longest time that can be asked for, 11 days; virtual time itself ends after 48."""


def check_amount(name: str, value: float) -> None:
    """Check that a time, or a rate, is a number with which can be counted.

    Raises:
        ValueError: It is not; the message has its name.
    """
    # A comparison with `nan` is false.
    if not 0 <= value <= MOST_SECONDS:
        raise ValueError(f"{name}: found {value:g}; it is from 0 to {MOST_SECONDS:,.0f}")


def picoseconds(seconds: float) -> int:
    """A cost as the engine counts it."""
    return round(seconds * PICOSECONDS)


class RequestTooLong(ValueError):
    """A request does not fit into the empty cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits and speed of a modelled engine.

    Attributes:
        max_num_seqs, max_num_batched_tokens: Sequences, and tokens, in one step; as vLLM's engine arguments.
        kv_cache_tokens: Capacity of the key-value cache.
        block_tokens: Tokens in one of its blocks.
        prefix_caching: Blocks are reused.
        chunked_prefill: A prompt is computed in parts if it does not fit into what is left of a step; else it waits for
            the next one.
        step_seconds: Fixed time of a step.
        decode_seconds: Additional time for each sequence that generates.
        prefill_seconds: Additional time for each prompt token.
        attention_seconds: Additional time for each token of the contexts of the sequences that generate.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_cache_tokens: int = 524_288
    block_tokens: int = 16
    prefix_caching: bool = True
    chunked_prefill: bool = True
    step_seconds: float = 0.006
    decode_seconds: float = 0.000_08
    prefill_seconds: float = 0.000_025
    attention_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: found {getattr(self, name)}; it is at least 1")
        if self.kv_cache_tokens < self.block_tokens:
            raise ValueError(f"kv_cache_tokens: found {self.kv_cache_tokens}; it is at least one block")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: found {self.max_num_batched_tokens}; it is at least max_num_seqs "
                f"({self.max_num_seqs}), of which each may generate a token in a step"
            )
        for name in ("step_seconds", "decode_seconds", "prefill_seconds", "attention_seconds"):
            check_amount(name, getattr(self, name))
        if self.step_seconds * NANOSECONDS < 1:
            raise ValueError(f"step_seconds: found {self.step_seconds:g}; a step takes time")


class Sequence:
    """One request at an engine.

    Attributes:
        prompt: Tokens of its prompt.
        wanted: Tokens that it generates, at least 1.
        submitted_ns, started_ns: When it came, and when it was first scheduled; -1: not yet.
        cached: Prompt tokens from the cache when it was first scheduled.
        made: Tokens generated; up to date when it is not generating.
    """

    __slots__ = (
        "cached",
        "computed",
        "finish_step",
        "held",
        "made",
        "number",
        "offset",
        "prompt",
        "started_ns",
        "state",
        "submitted_ns",
        "wanted",
    )

    def __init__(self, *, trajectory: int, group: int, common: int, prompt: int, wanted: int) -> None:
        """`common` is the number of tokens at the prompt's beginning that its prompt group shares."""
        self.prompt = prompt
        self.wanted = wanted
        self.held = Held(trajectory, group, common)
        self.number = 0
        self.state = "waiting"
        self.computed = 0
        self.made = 0
        self.cached = 0
        self.submitted_ns = self.started_ns = -1
        # While it generates: its computed tokens are `offset` plus the engine's decode steps.
        self.offset = 0
        self.finish_step = 0


@dataclass(slots=True, kw_only=True)
class EngineTally:
    """What an engine has done.

    Attributes:
        busy_ps: Time in steps.
        generated, prefilled: Tokens.
        recomputed: Those of `prefilled` that had been computed before a preemption.
        prompted, cached: Tokens of the prompts that were scheduled, and those of them that the cache had.
        batch_ps: Sequences that generate, summed over the time of the steps.
    """

    busy_ps: int = 0
    steps: int = 0
    generated: int = 0
    prefilled: int = 0
    recomputed: int = 0
    prompted: int = 0
    cached: int = 0
    preemptions: int = 0
    batch_ps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Steps of the same kind, one after another; several only without prompt tokens.

    Attributes:
        step_ps: Time of the first one.
        more_ps: By how much each lasts longer than the one before, since contexts have grown.
    """

    begin_ps: int
    step_ps: int
    more_ps: int
    steps: int
    chunks: tuple[tuple[Sequence, int], ...]
    generating: int

    @property
    def end_ps(self) -> int:
        return self.begin_ps + self.elapsed(self.steps)

    def elapsed(self, steps: int) -> int:
        """Time of the first steps."""
        return steps * self.step_ps + self.more_ps * (steps * (steps - 1) // 2)

    def begun(self, now: int) -> int:
        """Number of steps that have begun before a time in nanoseconds, at least 1."""
        elapsed = now * _PICO - self.begin_ps
        if not self.more_ps:
            return max(1, -(-elapsed // self.step_ps))
        return max(1, bisect_left(range(self.steps), elapsed, key=self.elapsed))


class EngineModel:
    """One engine.

    Attributes:
        tally: What it has done.
        cache: Its key-value cache.
    """

    def __init__(self, limits: EngineLimits, *, leap: bool = True) -> None:
        """`leap` is False to take each step by itself: slow, with the same result."""
        self.limits = limits
        self.cache = KvCache(
            limits.kv_cache_tokens // limits.block_tokens, limits.block_tokens, reuse=limits.prefix_caching
        )
        self.tally = EngineTally()
        self._leap = leap
        self._fixed_ps = picoseconds(limits.step_seconds)
        self._decode_ps = picoseconds(limits.decode_seconds)
        self._prefill_ps = picoseconds(limits.prefill_seconds)
        self._attention_ps = picoseconds(limits.attention_seconds)
        self._waiting: deque[Sequence] = deque()
        # In the order of their admission; those that still compute their prompts are in `_filling`, too.
        self._running: dict[int, Sequence] = {}
        self._filling: dict[int, Sequence] = {}
        self._aborted: list[Sequence] = []
        self._decode_steps = 0
        # Generating sequences by `offset` modulo the size of a block: a whole phase takes a new block in a step.
        self._phases = [0] * limits.block_tokens
        self._generating = 0
        self._offsets = 0
        self._ends: list[tuple[int, int, Sequence]] = []
        self._segment: _Segment | None = None
        self._resume_ns = 0
        self._clearing = False
        self._submitted = 0

    @property
    def ongoing(self) -> int:
        """Requests that it has not finished."""
        return len(self._waiting) + len(self._running)

    @property
    def busy(self) -> bool:
        """True during a step."""
        return self._segment is not None

    @property
    def next_ns(self) -> int | None:
        """Time of the next change, to call `advance` at; None: nothing happens before a request comes."""
        if (segment := self._segment) is not None:
            return -(-segment.end_ps // _PICO)
        return self._resume_ns if self.ongoing or self._aborted else None

    def submit(self, sequence: Sequence, now: int) -> None:
        """Add a request; it may be scheduled from the end of the present step on. Call `advance` afterwards.

        Raises:
            RequestTooLong: It does not fit into the empty cache.
        """
        most = self.cache.capacity * self.limits.block_tokens
        # The last token is never computed.
        if not self.limits.chunked_prefill:
            # Preempted before its last token, it is computed again as a whole.
            most = min(most, self.limits.max_num_batched_tokens)
        if sequence.prompt + sequence.wanted - 1 > most:
            raise RequestTooLong(
                f"a request with {sequence.prompt} prompt tokens and {sequence.wanted} to generate does not fit into "
                f"kv_cache_tokens, or without chunked_prefill into max_num_batched_tokens ({most})"
            )
        self._submitted += 1
        sequence.number = self._submitted
        sequence.submitted_ns = now
        sequence.held.common //= self.limits.block_tokens
        self._waiting.append(sequence)
        self._cut(now)

    def abort(self, sequence: Sequence, now: int) -> None:
        """End a request at the end of the present step; does nothing if it is finished."""
        if sequence.state != "done":
            self._aborted.append(sequence)
            self._cut(now)

    def pause(self, now: int, until: int, *, clear: bool) -> None:
        """Take no steps from the end of the present one until a time.

        Args:
            clear: Forget all that is cached; what is running is computed again.
        """
        self._resume_ns = max(self._resume_ns, until)
        self._clearing = self._clearing or clear
        self._cut(now)
        if self._segment is None:
            self._clear()

    def advance(self, now: int) -> list[Sequence]:
        """Take all steps that end by a time; the requests that were finished, in order."""
        finished: list[Sequence] = []
        while (segment := self._segment) is not None:
            end = segment.end_ps
            if end > now * _PICO:
                return finished
            self._complete(segment, finished)
            self._plan(end)
        if self._aborted:
            self._drop_aborted()
        if self.ongoing:
            self._plan(now * _PICO)
        return finished

    def _cut(self, now: int) -> None:
        """End the segment with the step that is under way."""
        segment = self._segment
        if segment is None or segment.steps == 1:
            return
        steps = segment.begun(now)
        if steps < segment.steps:
            self._segment = replace(segment, steps=steps)

    def _plan(self, now: int) -> None:
        """Begin the next step, if there is work and no pause; `now` is in picoseconds, as steps are."""
        self._segment = None
        self._drop_aborted()
        self._clear()
        if now < self._resume_ns * _PICO:
            return
        while self.ongoing:
            preempted = self._reserve_decodes()
            chunks = self._chunks(now, preempted=preempted)
            if chunks or self._generating:
                self._begin(now, chunks)
                return
            # Prompts have taken all blocks, and none can be finished.
            self._preempt_newest()

    def _begin(self, now: int, chunks: list[tuple[Sequence, int]]) -> None:
        prefill = sum(tokens for _, tokens in chunks)
        step = self._fixed_ps + self._decode_ps * self._generating + self._prefill_ps * prefill
        if self._attention_ps:
            step += self._attention_ps * (self._offsets + self._generating * self._decode_steps)
        steps = 1 if chunks or not self._leap else self._steps_ahead()
        self._segment = _Segment(
            begin_ps=now,
            step_ps=step,
            more_ps=self._attention_ps * self._generating,
            steps=steps,
            chunks=tuple(chunks),
            generating=self._generating,
        )

    def _steps_ahead(self) -> int:
        """Steps until a sequence ends, or until the cache is full; the blocks of the first one are taken already."""
        ends = self._ends
        while ends[0][2].state != "generating" or ends[0][2].finish_step != ends[0][0]:
            heapq.heappop(ends)
        most = ends[0][0] - self._decode_steps
        size = self.limits.block_tokens
        # In as many steps as a block has tokens, each sequence takes one block.
        rounds, free = divmod(self.cache.available, self._generating)
        steps = 1 + rounds * size
        while steps < most and (due := self._due(steps)) <= free:
            free -= due
            steps += 1
        return min(steps, most)

    def _due(self, steps: int = 0) -> int:
        """Blocks that generating sequences take in the step after so many further ones."""
        return self._phases[-(self._decode_steps + steps) % self.limits.block_tokens]

    def _reserve_decodes(self) -> bool:
        """Take the blocks of the next token of each sequence that generates; True if that preempted any."""
        preempted = False
        while (due := self._due()) > self.cache.available:
            self._preempt_newest()
            preempted = True
        if due:
            self.cache.take_anonymous(due)
        return preempted

    def _chunks(self, now: int, *, preempted: bool) -> list[tuple[Sequence, int]]:
        chunks: list[tuple[Sequence, int]] = []
        budget = self.limits.max_num_batched_tokens - self._generating
        for sequence in self._filling.values():
            budget -= self._fill(sequence, budget, chunks)
        while self._waiting and budget > 0 and not preempted and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            if not self._admit(sequence, now, budget):
                break
            self._waiting.popleft()
            budget -= self._fill(sequence, budget, chunks)
        return chunks

    def _admit(self, sequence: Sequence, now: int, budget: int) -> bool:
        cache, held = self.cache, sequence.held
        total = sequence.prompt + sequence.made
        hit = cache.find(held, total)
        missing = -(-total // cache.block_tokens) - hit.shared - hit.own
        if missing > cache.available - hit.idle:
            return False
        if not self.limits.chunked_prefill and total - (hit.shared + hit.own) * cache.block_tokens > budget:
            return False
        cache.hold(held, hit)
        sequence.computed = (hit.shared + hit.own) * cache.block_tokens
        if sequence.started_ns < 0:
            sequence.started_ns = now // _PICO
            sequence.cached = sequence.computed
            self.tally.prompted += total
            self.tally.cached += sequence.computed
        else:
            self.tally.recomputed += total - sequence.computed
        sequence.state = "filling"
        self._running[sequence.number] = self._filling[sequence.number] = sequence
        return True

    def _fill(self, sequence: Sequence, budget: int, chunks: list[tuple[Sequence, int]]) -> int:
        """Plan a chunk of a prompt; its tokens."""
        cache, held = self.cache, sequence.held
        have = (held.shared + held.private) * cache.block_tokens
        room = have + cache.available * cache.block_tokens - sequence.computed
        tokens = min(sequence.prompt + sequence.made - sequence.computed, budget, room)
        if tokens <= 0:
            return 0
        after = sequence.computed + tokens
        blocks = -(-after // cache.block_tokens) - held.shared - held.private
        if blocks > 0:
            cache.take(held, blocks)
        cache.share(held, sequence.computed, after)
        sequence.computed = after
        chunks.append((sequence, tokens))
        return tokens

    def _preempt_newest(self) -> None:
        sequence = self._running[next(reversed(self._running))]
        self.tally.preemptions += 1
        self._stop(sequence)
        self._waiting.appendleft(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch, between two steps; its blocks become free."""
        held = sequence.held
        del self._running[sequence.number]
        if sequence.state == "generating":
            sequence.computed = sequence.offset + self._decode_steps
            sequence.made = sequence.wanted - (sequence.finish_step - self._decode_steps)
            self._phases[sequence.offset % self.limits.block_tokens] -= 1
            self._generating -= 1
            self._offsets -= sequence.offset
            held.private = -(-sequence.computed // self.limits.block_tokens) - held.shared
        else:
            del self._filling[sequence.number]
        self.cache.release(held, sequence.computed)
        sequence.computed = 0
        sequence.state = "waiting"

    def _complete(self, segment: _Segment, finished: list[Sequence]) -> None:
        tally = self.tally
        elapsed = segment.elapsed(segment.steps)
        tally.busy_ps += elapsed
        tally.steps += segment.steps
        tally.batch_ps += elapsed * segment.generating
        if segment.generating:
            tally.generated += segment.steps * segment.generating
            if segment.steps > 1:
                rounds, rest = divmod(segment.steps - 1, self.limits.block_tokens)
                taken = rounds * self._generating + sum(self._due(steps) for steps in range(1, rest + 1))
                self.cache.take_anonymous(taken)
            self._decode_steps += segment.steps
            self._finish_generating(finished)
        for sequence, tokens in segment.chunks:
            tally.prefilled += tokens
            if sequence.computed == sequence.prompt + sequence.made:
                self._finish_filling(sequence, finished)

    def _finish_generating(self, finished: list[Sequence]) -> None:
        ends = self._ends
        while ends and ends[0][0] <= self._decode_steps:
            step, _, sequence = heapq.heappop(ends)
            if sequence.state == "generating" and sequence.finish_step == step:
                self._finish(sequence, finished)

    def _finish_filling(self, sequence: Sequence, finished: list[Sequence]) -> None:
        # The step that computes the last token of the prompt samples the next one.
        sequence.made += 1
        self.tally.generated += 1
        if sequence.made == sequence.wanted:
            self._finish(sequence, finished)
            return
        del self._filling[sequence.number]
        sequence.state = "generating"
        sequence.offset = sequence.computed - self._decode_steps
        sequence.finish_step = self._decode_steps + sequence.wanted - sequence.made
        self._phases[sequence.offset % self.limits.block_tokens] += 1
        self._generating += 1
        self._offsets += sequence.offset
        heapq.heappush(self._ends, (sequence.finish_step, sequence.number, sequence))

    def _finish(self, sequence: Sequence, finished: list[Sequence]) -> None:
        self._stop(sequence)
        sequence.state = "done"
        finished.append(sequence)

    def _drop_aborted(self) -> None:
        aborted, self._aborted = self._aborted, []
        for sequence in aborted:
            if sequence.state == "waiting":
                self._waiting.remove(sequence)
            elif sequence.state != "done":
                self._stop(sequence)
            sequence.state = "done"

    def _clear(self) -> None:
        if self._clearing:
            self._clearing = False
            while self._running:
                self._preempt_newest()
            self.cache.clear()
