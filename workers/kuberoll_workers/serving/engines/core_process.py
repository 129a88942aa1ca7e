"""The process of vLLM's engine, whose outputs go through an `OutputBuffer`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kuberoll_workers.serving.engines.output_buffer import OutputBuffer

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request

# vLLM's own function, while its class has `run` in its place: a forked process has the class as its parent changed it.
_replaced: Callable[..., None] | None = None


class BufferedQueue:
    """vLLM's queue of outputs with a buffer for each client before it."""

    def __init__(self, following: queue.Queue[Any], requests: Mapping[str, Request]) -> None:
        """`requests` are those that the engine has, by id."""
        from vllm.sampling_params import RequestOutputKind

        self._following = following
        self._requests = requests
        self._whole = RequestOutputKind.FINAL_ONLY
        self._buffers: dict[int, OutputBuffer] = {}
        # vLLM's thread of requests puts some errors itself.
        self._lock = threading.Lock()

    def put_nowait(self, item: tuple[int, EngineCoreOutputs] | bytes) -> None:
        """Put what is due of a client's outputs, and all that is something else."""
        if isinstance(item, bytes) or item[0] < 0:
            self._following.put_nowait(item)
            return
        client, message = item
        with self._lock:
            buffer = self._buffers.get(client)
            if buffer is None:
                buffer = self._buffers[client] = OutputBuffer(self._may_wait)
            for part in buffer.add(message):
                self._following.put_nowait((client, part))
            if len(buffer) > len(self._requests):
                buffer.forget(self._requests.__contains__)

    def get(self, *arguments: Any, **options: Any) -> Any:
        """Get the next item, as `queue.Queue` does."""
        return self._following.get(*arguments, **options)

    def _may_wait(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        parameters = None if request is None else request.sampling_params
        return (
            parameters is not None
            and parameters.output_kind == self._whole
            # They are looked for where the outputs arrive.
            and not parameters.stop
        )


def run(*arguments: Any, **options: Any) -> None:
    """Run the engine's process, instead of `EngineCoreProc.run_engine_core`."""
    from vllm.v1.engine.core import EngineCoreProc

    process: Any = EngineCoreProc
    busy_loop = process.run_busy_loop

    def run_busy_loop(engine: Any) -> None:
        engine.output_queue = BufferedQueue(engine.output_queue, engine.scheduler.requests)
        busy_loop(engine)

    process.run_busy_loop = run_busy_loop
    (_replaced or process.run_engine_core)(*arguments, **options)


@contextmanager
def buffered_outputs() -> Iterator[None]:
    """Start engines' processes with a buffer while the context lasts."""
    from vllm.v1.engine.core import EngineCoreProc

    global _replaced
    process: Any = EngineCoreProc
    _replaced = original = process.run_engine_core
    process.run_engine_core = staticmethod(run)
    try:
        yield
    finally:
        process.run_engine_core = staticmethod(original)
        _replaced = None
