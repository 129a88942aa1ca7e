"""Process in which an environment runs: creates it, steps it, and answers.

The process does not try to recover from what the environment does to it: if an answer cannot be sent, it ends.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Iterator
from typing import Any

import orjson

from kuberoll_workers.data.plain import NotPlain, message_of, plain
from kuberoll_workers.environments import sandbox, wire
from kuberoll_workers.environments.outcome import EnvironmentFault, StepInvalid, fault_of, split_return
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment

_ROWS = 256


def serve(channel: socket.socket) -> None:
    """Answer requests until the channel is closed."""
    start = wire.decode_start(_receive(channel))
    try:
        environment = _make(start)
    except BaseException as error:
        _send(channel, wire.encode(wire.fault_message(_creation_failure(error))))
        return
    _send(channel, wire.encode(wire.Answer(False, [])))
    # Bound to local names, which the environment cannot replace.
    receive, send, decode, step = _receive, _send, wire.decode_request, _step
    while True:
        request = decode(receive(channel))
        if isinstance(request, wire.Step):
            send(channel, step(environment, request))
        else:
            for rows in _generate(environment, request):
                send(channel, rows)


def _make(start: wire.Start) -> Any:
    sandbox.enter(
        sandbox.Sandbox(protected=start.protected, readable=start.readable, writable=start.writable),
        scratch=start.scratch,
    )
    return PlainSpec(name=start.name, type=start.type, entrypoint=start.entrypoint, config=orjson.loads(start.config))()


def _creation_failure(error: BaseException) -> EnvironmentFault:
    if isinstance(error, UnusableEnvironment):
        return StepInvalid(str(error), error.traceback)
    fault = fault_of(error)
    return StepInvalid(str(fault), fault.traceback)


def _generate(environment: Any, request: wire.Generate) -> Iterator[bytes]:
    try:
        made = environment.generate_dataset(request.count, request.seed)
        rows: list[bytes] = []
        for number, row in enumerate(made):
            rows.append(orjson.dumps(plain(row, f"generated row {number}")))
            if len(rows) == _ROWS:
                yield wire.encode(wire.Rows(rows))
                rows = []
        if rows:
            yield wire.encode(wire.Rows(rows))
        yield wire.encode(wire.Rows([]))
    except NotImplementedError as error:
        yield wire.encode(wire.Fault("raised", message_of(error)))
    except NotPlain as error:
        yield wire.encode(wire.Fault("invalid", str(error)))
    except BaseException as error:
        yield wire.encode(wire.fault_message(fault_of(error, "generate_dataset")))


def _step(environment: Any, step: wire.Step) -> bytes:
    try:
        logs, metadata = wire.inputs_of(step)
        returned = environment.step(logs, metadata)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        return wire.encode(wire.answer_of(split_return(returned, len(logs))))
    except BaseException as error:
        return wire.encode(wire.fault_message(fault_of(error)))


async def _awaited(answer: Any) -> Any:
    return await answer


def _receive(channel: socket.socket) -> bytes:
    return _exactly(channel, wire.length(_exactly(channel, wire.HEADER.size)))


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = channel.recv(min(size - len(data), 1 << 20))
        if not chunk:
            # The worker has closed the channel.
            os._exit(0)
        data += chunk
    return bytes(data)


def _send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(data)
