"""The channel to an environment's process: what arrives, in whatever pieces and from whomever, and what is taken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments.channel import Answerer, Caller, Inbox, frame
from kuberoll_workers.environments.messages import InvalidMessage

ASKED, OTHER = 7, 8
CALLS = [bytes([number]) * 16 for number in range(1, 4)]

_bodies = st.binary(max_size=60)


@st.composite
def pieces(draw: Any) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The answer to the first call, and what arrives: it, cut somewhere, with other things before, in it and after."""
    body = draw(_bodies)
    foreign = st.one_of(
        _bodies,
        st.builds(frame, st.sampled_from(CALLS[1:]), _bodies),
        st.just(frame(CALLS[0], body)),
        st.just(struct.pack(">II16s", len(body), zlib.crc32(body) ^ 1, CALLS[0]) + body),
    )
    answer = frame(CALLS[0], body)
    cuts = sorted(draw(st.lists(st.integers(0, len(answer)), max_size=4)))
    arrived = [
        (ASKED, answer[start:end]) for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True) if end > start
    ]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(arrived)))
        arrived.insert(place, (draw(st.sampled_from([ASKED, OTHER])), draw(foreign)))
    if draw(st.booleans()) and len(arrived) > 1:
        arrived[0], arrived[-1] = arrived[-1], arrived[0]
    return body, [(process, data) for process, data in arrived if data]


@given(pieces())
def test_only_the_whole_answer_of_the_process_that_was_asked_is_taken(arriving: tuple[bytes, list[Any]]) -> None:
    body, arrived = arriving
    inbox = Inbox()
    inbox.process = ASKED
    inbox.expect(CALLS[0])
    seen = bytearray()
    taken: bytes | None = None
    for process, data in arrived:
        seen += data
        try:
            taken = inbox.take(data, process)
        except InvalidMessage:
            # What came so far is not the beginning of the one answer, or not of the one process.
            assert process == OTHER or not frame(CALLS[0], body).startswith(seen) or taken is not None
            return
        if taken is not None:
            break
    else:
        assert len(seen) < len(frame(CALLS[0], body)) or not seen.startswith(frame(CALLS[0], body)[:24])
        return
    assert taken == body
    assert bytes(seen) == frame(CALLS[0], body)
    # A second one is none, whoever it is from.
    for process in (ASKED, OTHER):
        with pytest.raises(InvalidMessage):
            inbox.take(frame(CALLS[0], body), process)


def answering(answer: Callable[[Answerer, socket.socket], None]) -> tuple[Caller, int]:
    """The worker's end of a channel, and the process at its other end."""
    ours, theirs = socket.socketpair()
    caller = Caller(ours)
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            ours.close()
            answer(Answerer(theirs), theirs)
        os._exit(0)
    theirs.close()
    return caller, process


def test_the_kernel_says_who_has_written() -> None:
    def answer(answerer: Answerer, end: socket.socket) -> None:
        call, body = answerer.receive()
        answerer.answer(call, body)
        # Both come back here, as from a step that forks; Python has closed the channel in the copy.
        call, body = answerer.receive()
        copy = os.fork()
        answerer.answer(call, b"from a copy" if copy == 0 else body)
        # A descriptor of another number is not closed.
        call, _ = answerer.receive()
        kept = os.dup(end.fileno())
        if os.fork() == 0:
            os.write(kept, frame(call, b"forged"))
            os._exit(0)
        os.wait()
        os.wait()
        answerer.answer(call, b"mine")

    caller, process = answering(answer)
    assert caller.ask_now(b"one", seconds=60) == b"one"
    assert caller.ask_now(b"two", seconds=60) == b"two"
    with pytest.raises(InvalidMessage, match=r"process \d+ has written to its channel, and process \d+ was asked"):
        caller.ask_now(b"three", seconds=60)
    caller.close()
    os.waitpid(process, 0)


async def test_what_comes_between_two_calls_ends_the_channel() -> None:
    def answer(answerer: Answerer, end: socket.socket) -> None:
        call, body = answerer.receive()
        answerer.answer(call, body)
        os.write(end.fileno(), frame(call, body))
        answerer.receive()

    caller, process = answering(answer)

    async def ask_twice() -> None:
        for body in (b"one", b"two"):
            assert await caller.ask(body) == body

    # The second answer comes with the first one, or after it.
    with pytest.raises(InvalidMessage, match=r"more than one answer|nobody asked for|not the answer to its call"):
        await ask_twice()
    assert not caller.sound
    caller.close()
    await asyncio.to_thread(os.waitpid, process, 0)
