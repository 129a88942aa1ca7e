"""Process in which an environment runs: creates it, steps it, and answers.

The process does not try to recover from what the environment does to it: if an answer cannot be sent, it ends.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import orjson

from kuberoll_api.environment_types import AGENT_TYPE
from kuberoll_workers.data.lasting import is_lasting
from kuberoll_workers.data.plain import NotPlain, message_of, plain
from kuberoll_workers.environments import messages, process_access
from kuberoll_workers.environments.batches import AnyBatch, CloseBatch, GroupBatch, ResetBatch, TrialsBatch, awaited
from kuberoll_workers.environments.channel import Answerer
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.outcome import EnvironmentFault, EpisodeLost, StepInvalid, StepRaised, fault_of
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment

STACK_FILE = ".kuberoll-stack"
"""File in the scratch directory to which the process prints its stack."""
STACK_SIGNAL = signal.SIGRTMAX - 5
"""Signal on which it does; Python's own handler needs neither the GIL nor the code's cooperation."""

_ROWS = 256
_METRICS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def serve(end: socket.socket) -> None:
    """Answer requests until the channel is closed."""
    channel = Answerer(end)
    call, body = channel.receive()
    start = messages.decode_request(messages.unwrap_call(body)[1], messages.CreateRequest)
    stack = os.open(f"{start.scratch}/{STACK_FILE}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
    try:
        environment = _make(start)
        served = ServedEnvironment(environment)
    except BaseException as error:
        channel.answer(call, messages.wrap_fault(_creation_failure(error)))
        return
    channel.answer(call, messages.wrap_answer(messages.encode(messages.CreateAnswer(served.hooks))))
    # Bound to local names, which the environment cannot replace.
    receive, answer, read, answer_to = channel.receive, channel.answer, messages.unwrap_call, served.answer
    while True:
        call, body = receive()
        answer(call, answer_to(*read(body)))


class ServedEnvironment:
    """An environment that is called by messages; a stateful one only for episodes that were begun here."""

    def __init__(self, environment: Any) -> None:
        self.hooks = Hooks.of(environment)
        self._environment = environment
        self._open: set[str] = set()
        self._rows: Iterator[bytes] = iter(())

    def answer(self, method: str, request: bytes) -> bytes:
        """Call a method of the environment; returns the encoded answer."""
        try:
            match method:
                case messages.SHUTDOWN:
                    if self.hooks.shutdown:
                        awaited(self._environment.shutdown())
                    return messages.wrap_answer(messages.EMPTY)
                case messages.GENERATE_DATASET:
                    self._rows = self._generated(messages.decode_request(request, messages.RowsRequest))
                    return messages.wrap_answer(next(self._rows))
                case messages.MORE_ROWS:
                    method = messages.GENERATE_DATASET
                    return messages.wrap_answer(next(self._rows))
                case messages.POST_PROCESS:
                    method = "global_post_process_and_metrics"
                    return messages.wrap_answer(self._metrics(request))
            batch = messages.batch_of(request, method)
            results = self._run(batch) if self.hooks.stateful else _call(self._environment, batch)
            return messages.wrap_answer(messages.answer_of(batch, results))
        except BaseException as error:
            return messages.wrap_fault(fault_of(error, method))

    def _metrics(self, request: bytes) -> bytes:
        columns = orjson.loads(bytes(messages.decode_request(request, messages.PostProcessRequest).columns))
        metrics = dict(self._environment.global_post_process_and_metrics(columns)[1])
        text = orjson.dumps(metrics, default=_plain_metric, option=_METRICS)
        return messages.encode(messages.PostProcessAnswer(messages.raw(text)))

    def _generated(self, request: messages.RowsRequest) -> Iterator[bytes]:
        """Answers with some rows each; the last has none."""
        try:
            rows = iter(self._environment.generate_dataset(request.count, request.seed))
            numbers = itertools.count()
            while made := [
                messages.raw(orjson.dumps(plain(row, f"generated row {next(numbers)}"))) for row in islice(rows, _ROWS)
            ]:
                yield messages.encode(messages.RowsAnswer(made))
            yield messages.encode(messages.RowsAnswer([]))
        except NotImplementedError as error:
            raise StepRaised(message_of(error)) from error
        except NotPlain as error:
            raise StepInvalid(str(error)) from error

    def _run(self, batch: AnyBatch) -> Sequence[Any]:
        if isinstance(batch, ResetBatch):
            # Also if it raises an exception: what it has made until then must be closed.
            self._open.update(episode.id for episode in batch.episodes)
            return _call(self._environment, batch)
        if isinstance(batch, CloseBatch):
            ends = [end for end in batch.ends if end.id in self._open]
            self._open.difference_update(end.id for end in ends)
            if ends:
                _call(self._environment, CloseBatch(ends))
            return [None] * len(batch)
        if isinstance(batch, GroupBatch | TrialsBatch):
            return _call(self._environment, batch)
        lost = [item.episode for item in batch.items if item.episode is not None and item.episode not in self._open]
        if lost:
            raise EpisodeLost(f"this instance of the environment has not reset the episode {lost[0]}")
        return _call(self._environment, batch)


def _plain_metric(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _call(environment: Any, batch: AnyBatch) -> Sequence[Any]:
    return batch.split(awaited(batch.invoke(environment)))


def _make(start: messages.CreateRequest) -> Any:
    readable = [*start.readable]
    if start.type == "code_execution":
        # It supervises programs, which can read none of it.
        readable.append("/proc")
    files = process_access.ProcessAccess(protected=start.protected, readable=readable, writable=start.writable)
    config = orjson.loads(bytes(start.config))
    if start.type == AGENT_TYPE and config["agent"]["command"] is not None:
        # None of its code runs in this process: each of its programs gets this access, and no more, by itself.
        process_access.hide_from_others()
        config["access"] = asdict(files)
    else:
        process_access.enter(files, scratch=start.scratch)
    return PlainSpec(name=start.name, type=start.type, entrypoint=start.entrypoint, config=config)()


def _creation_failure(error: BaseException) -> EnvironmentFault:
    """A fault for the pod, which sees no exception of this process: invalid, or raised if a retry may help."""
    fault = error if isinstance(error, UnusableEnvironment) else fault_of(error)
    kind = StepInvalid if is_lasting(error) else StepRaised
    return kind(str(fault), fault.traceback)
