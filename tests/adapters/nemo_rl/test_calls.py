"""Synchronous callers: their loops, their threads' modes, and Ctrl-C."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
import threading
import traceback

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl.calls import CallerContext, run_sync

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="of nobody")


async def seen() -> tuple[str, bool, bool, int]:
    inference = torch.is_inference_mode_enabled()
    return VARIABLE.get(), torch.is_grad_enabled(), inference, threading.get_ident()


def test_where_no_loop_runs_it_is_run_in_the_caller_s_thread() -> None:
    assert run_sync(seen, CallerContext())[3] == threading.get_ident()


@pytest.mark.parametrize(("gradients", "inference"), [(True, False), (False, False), (False, True)])
async def test_where_a_loop_runs_another_thread_has_what_the_caller_s_has(gradients: bool, inference: bool) -> None:
    VARIABLE.set("of the caller")
    with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
        *found, thread = run_sync(seen, CallerContext())
    assert found == ["of the caller", gradients, inference]
    assert thread != threading.get_ident()


async def test_what_is_raised_in_the_other_thread_is_raised_here() -> None:
    async def broken() -> None:
        raise LookupError("there")

    with pytest.raises(LookupError, match="there"):
        run_sync(broken, CallerContext())


def test_a_caller_s_context_is_for_any_number_of_calls_at_once() -> None:
    VARIABLE.set("of the caller")
    caller = CallerContext()
    VARIABLE.set("later")
    assert caller.run(lambda: caller.run(VARIABLE.get)) == "of the caller"


def test_ctrl_c_stops_what_goes_on_in_the_other_thread() -> None:
    begun, stopped = threading.Event(), threading.Event()
    waiting = threading.get_ident()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def caller() -> None:
        run_sync(endless, CallerContext())

    def called() -> set[str]:
        return {frame.name for frame in traceback.extract_stack(sys._current_frames()[waiting])}

    def interrupt() -> None:
        begun.wait()
        # It may be starting the other thread still.
        while not {"result", "wait"} <= called():
            pass
        signal.pthread_kill(waiting, signal.SIGINT)

    loop = asyncio.new_event_loop()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(caller())
    finally:
        signal.signal(signal.SIGINT, handler)
        loop.close()
    assert stopped.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "kuberoll-rollout"]
