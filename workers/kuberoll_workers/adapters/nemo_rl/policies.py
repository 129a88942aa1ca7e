"""Adapters of policies with NeMo RL's interface to the loop's: batches turn by turn, or single requests."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy

from kuberoll_workers.adapters.nemo_rl.actors import ray_cause
from kuberoll_workers.adapters.nemo_rl.calls import CallerContext
from kuberoll_workers.adapters.nemo_rl.responses import Prompts, Response, collect, generation_batch, read_responses
from kuberoll_workers.data.messages import LOGPROB_TYPE, TOKEN_TYPE
from kuberoll_workers.environments.inline import DaemonThread
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyError,
    PolicyRefused,
    PolicyUnavailable,
)

log = logging.getLogger(__name__)

# Errors that a retry would not change.
_BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    TypeError,
)

_Answer = GenerationResult | PolicyError


class PolicyBroken(PolicyError):
    """A bug in the policy's code: not retried."""


class PolicyAdapter(Protocol):
    """A policy for the loop that wraps one with NeMo RL's interface."""

    @property
    def gave_logprobs(self) -> bool:
        """True if any response had log-probabilities."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `Policy`."""
        ...

    async def close(self) -> None:
        """Stop threads and calls."""
        ...


def require_async(policy_generation: Any) -> None:
    """Check that a policy generates asynchronously.

    Raises:
        AssertionError: It has no `generate_async`, or its configuration says that its engine is not asynchronous.
    """
    cfg = getattr(policy_generation, "cfg", None)
    engine = cfg.get("vllm_cfg") if isinstance(cfg, Mapping) else None
    enabled = not isinstance(engine, Mapping) or engine.get("async_engine", False)
    sglang = getattr(policy_generation, "sglang_cfg", None)
    if isinstance(sglang, Mapping) and sglang.get("backend") == "sglang":
        enabled = sglang.get("use_async_rollouts", False)
    if not enabled or not callable(getattr(policy_generation, "generate_async", None)):
        raise AssertionError(
            "Async generation is not enabled. The policy needs a generate_async method and, where it has a vllm_cfg, "
            "async_engine=True in it; with SGLang use_async_rollouts=True."
        )


def error_of(error: Exception) -> PolicyError:
    """Convert an exception of a policy into a typed error."""
    if isinstance(error, PolicyError):
        return error
    cause = ray_cause(error)
    text = f"the policy raised {type(cause).__name__}: {cause}"
    if isinstance(cause, _BUGS):
        return PolicyBroken(text)
    return PolicyRefused(text) if isinstance(cause, ValueError) else PolicyUnavailable(text)


class _PendingRequest:
    __slots__ = ("future", "request")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.future: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()

    def settle(self, answer: _Answer) -> None:
        if self.future.done():
            return
        if isinstance(answer, PolicyError):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


class BatchPolicy:
    """`generate(batch, greedy=)`: all requests of one iteration of the event loop go into one call.

    Rows are in the order of the caller's batch. There is one call at a time, in its own thread: requests that arrive
    meanwhile wait and go into the next one.
    """

    def __init__(
        self, policy_generation: Any, *, greedy: bool, pad_token_id: int, batch_type: type[Any], caller: CallerContext
    ) -> None:
        """
        Args:
            batch_type: The class of the batches that the policy is given.
            caller: Context of the caller's thread, which the policy is called with.
        """
        self.gave_logprobs = False
        self._policy = policy_generation
        self._greedy = greedy
        self._pad_token_id = pad_token_id
        self._batch_type = batch_type
        self._caller = caller
        self._waiting: list[_PendingRequest] = []
        self._scheduled = False
        self._call: asyncio.Task[None] | None = None
        self._thread: DaemonThread | None = None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        waiting = _PendingRequest(request)
        self._waiting.append(waiting)
        self._schedule()
        return await waiting.future

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            await asyncio.wait((self._call,))
        if self._thread is not None:
            self._thread.abandon()

    def _schedule(self) -> None:
        if not self._scheduled and self._call is None:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._scheduled = False
        batch = [waiting for waiting in self._waiting if not waiting.future.done()]
        self._waiting.clear()
        if batch:
            batch.sort(key=_position)
            self._call = asyncio.create_task(self._answer(batch))
            self._call.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._call = None
        if self._waiting:
            self._schedule()

    async def _answer(self, batch: Sequence[_PendingRequest]) -> None:
        for waiting, answer in zip(batch, await self._ask([waiting.request for waiting in batch]), strict=True):
            if isinstance(answer, PolicyRefused) and len(batch) > 1:
                # One invalid prompt fails the whole call: send each alone to find it.
                (answer,) = await self._ask([waiting.request])
            waiting.settle(answer)

    async def _ask(self, requests: Sequence[GenerationRequest]) -> Sequence[_Answer]:
        # Copy the prompts first: they grow with their trajectories.
        data, prompts = generation_batch(
            [request.token_ids for request in requests],
            [request.sampling.stop for request in requests],
            pad_token_id=self._pad_token_id,
            batch_type=self._batch_type,
        )
        if self._thread is None:
            self._thread = DaemonThread()

        def call() -> list[_Answer]:
            outputs = self._policy.generate(data, greedy=self._greedy)
            return self._answers(outputs, prompts, requests)

        try:
            return await asyncio.wrap_future(self._thread.submit(lambda: self._caller.run(call)))
        except Exception as error:
            return [_reported(error)] * len(requests)

    def _answers(self, outputs: Any, prompts: Prompts, requests: Sequence[GenerationRequest]) -> list[_Answer]:
        read = read_responses(outputs, prompts)
        self.gave_logprobs |= outputs.get("logprobs") is not None
        return [_answer_of(response, request) for response, request in zip(read, requests, strict=True)]


class StreamPolicy:
    """`generate_async(batch, greedy=)`: one call for each request, a batch of one, any number at once."""

    def __init__(self, policy_generation: Any, *, greedy: bool, pad_token_id: int, batch_type: type[Any]) -> None:
        """
        Args:
            batch_type: The class of the batches that the policy is given.

        Raises:
            AssertionError: The policy does not generate asynchronously.
        """
        require_async(policy_generation)
        self.gave_logprobs = False
        self._policy = policy_generation
        self._greedy = greedy
        self._pad_token_id = pad_token_id
        self._batch_type = batch_type

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        data, prompts = generation_batch(
            [request.token_ids],
            [request.sampling.stop],
            pad_token_id=self._pad_token_id,
            batch_type=self._batch_type,
        )
        try:
            stream = self._policy.generate_async(data, greedy=self._greedy)
            outputs = await collect(stream, 1, pad_token_id=self._pad_token_id)
            (response,) = read_responses(outputs, prompts)
            self.gave_logprobs |= outputs.get("logprobs") is not None
        except Exception as error:
            raise _reported(error) from error
        answer = _answer_of(response, request)
        if isinstance(answer, PolicyError):
            raise answer
        return answer

    async def close(self) -> None:
        return None


def _reported(error: Exception) -> PolicyError:
    typed = error_of(error)
    if isinstance(typed, PolicyBroken):
        # Failures are stored without tracebacks, and the user needs this one to find the bug.
        log.error("%s", typed, exc_info=error)
    if typed is not error:
        typed.__cause__ = error
    return typed


def _position(waiting: _PendingRequest) -> int:
    # A session's id begins with the task's index, which is the row in the caller's batch.
    return int(waiting.request.session_id.partition("-")[0])


def _answer_of(response: Response | PolicyUnavailable, request: GenerationRequest) -> _Answer:
    if isinstance(response, PolicyUnavailable):
        return response
    room, generated = request.sampling.max_tokens, len(response.token_ids)
    # If the policy does not report truncation, a response that fills the room counts as truncated.
    cut = generated >= room if response.truncated is None else response.truncated or generated > room
    logprobs: array[float] = array(LOGPROB_TYPE)
    if response.logprobs is not None:
        logprobs.frombytes(response.logprobs.tobytes())
    return GenerationResult(token_ids=_plain(response), logprobs=logprobs, finish_reason="length" if cut else "stop")


def _plain(response: Response) -> array[int]:
    ids = array(TOKEN_TYPE)
    ids.frombytes(response.token_ids.astype(numpy.int32).tobytes())
    return ids
