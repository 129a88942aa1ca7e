"""Calls between synchronous code and the event loop, with the caller's thread-local state."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class CallerContext:
    """The thread-local state of a caller, for code that is called in another thread.

    It has context variables, torch's gradient and inference modes, and the current CUDA device.
    """

    def __init__(self) -> None:
        """Copy the state of the current thread."""
        import torch

        self._context = contextvars.copy_context()
        self._gradients = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device() if initialized else None

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Call a function with the state of the thread that created this object."""
        # A context can be entered once at a time.
        return self._context.copy().run(self._run, call)

    def _run(self, call: Callable[[], _Result]) -> _Result:
        import torch

        if self._device is not None:
            torch.cuda.set_device(self._device)
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._gradients):
            return call()


def run_sync(main: Callable[[], Coroutine[Any, Any, _Result]], caller: CallerContext) -> _Result:
    """Run a coroutine to its end; inside a running event loop, as in a notebook, in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    return _run_in_thread(main, caller)


def _run_in_thread(main: Callable[[], Coroutine[Any, Any, _Result]], caller: CallerContext) -> _Result:
    outcome: concurrent.futures.Future[_Result] = concurrent.futures.Future()
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def body() -> _Result:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        return await main()

    def work() -> None:
        try:
            result = caller.run(lambda: asyncio.run(body()))
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    thread = threading.Thread(target=work, name="kuberoll-rollout", daemon=True)
    thread.start()
    try:
        return outcome.result()
    except BaseException:
        # Ctrl-C reaches this thread only: stop the work in the other one.
        if not outcome.done():
            for loop, task in begun:
                loop.call_soon_threadsafe(task.cancel)
            thread.join()
        raise
