"""The fleet behind an endpoint as NeMo RL's generation backend."""

from __future__ import annotations

import asyncio
import copy
import uuid
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

from kuberoll_workers.adapters.background import BackgroundLoop
from kuberoll_workers.adapters.nemo_rl.batched_data_dict import batch_class
from kuberoll_workers.data.messages import TOKEN_TYPE
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
)
from kuberoll_workers.policy.routing.discovery import EndpointDiscovery
from kuberoll_workers.policy.routing.router import RoutedPolicy

if TYPE_CHECKING:
    import torch

_CONNECTIONS: Final = 1024
_PAUSE_SECONDS: Final = 1.0


class ServedGeneration:
    """A generation backend with the methods of NeMo RL's `GenerationInterface`, over an endpoint of KubeRoll.

    Each sequence is a request of its own, sent to the replica that has room; requests that fail are sent again until
    `patience_seconds` have passed. The replicas are the endpoint's: nothing starts, sleeps or wakes with a phase.
    Connections are opened with the first request, so it can be pickled and sent to actors.

    Attributes:
        cfg: NeMo RL's `policy.generation`, with an asynchronous `vllm` as backend, which says to NeMo RL that
            `generate_async` may be called.
        weight_synchronizer: What NeMo RL calls to bring its policy's weights here; None: it may evaluate, but not
            train.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any],
        url: str,
        *,
        token: str | None = None,
        weight_synchronizer: Any = None,
        patience_seconds: float = 600.0,
    ) -> None:
        """
        Args:
            cfg: `max_new_tokens`, `temperature`, `top_p`, `top_k`, `stop_strings`, `stop_token_ids`, `_pad_token_id`
                and `vllm_cfg.max_model_len`, which must not exceed the window of the engine.
            token: Of scope `generate`.
            patience_seconds: Of one sequence, with all its attempts.

        Raises:
            ValueError: `cfg` lacks the window.
        """
        self.cfg = copy.deepcopy(dict(cfg))
        engine = dict(self.cfg.get("vllm_cfg") or {})
        if not isinstance(engine.get("max_model_len"), int):
            raise ValueError("policy.generation.vllm_cfg.max_model_len: not set; set it to the window of the engine")
        self.cfg["backend"] = "vllm"
        self.cfg["vllm_cfg"] = {**engine, "async_engine": True}
        self.weight_synchronizer = weight_synchronizer
        self._url = url
        self._token = token
        self._patience = patience_seconds
        self._connect()

    def _connect(self) -> None:
        self._background = BackgroundLoop()
        self._stack: AsyncExitStack | None = None
        self._policy: RoutedPolicy | None = None
        self._opening: asyncio.Lock | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _LIVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Continue all sequences of a batch.

        Args:
            data: `input_ids`, [sequences, length], padded on the right, `input_lengths`, [sequences], and optionally
                `stop_strings`, for each sequence a list or None.
            greedy: Take the most probable token instead of sampling.

        Returns:
            A batch of the same class in the same order, `GenerationOutputSpec`: `output_ids`, prompt and response,
            int64, and `logprobs` of the response's tokens, 0 elsewhere, float32, both [sequences, longest], padded on
            the right; `generation_lengths`, `unpadded_sequence_lengths` and `truncated`, [sequences].

        Raises:
            PolicyUnavailable: The endpoint did not answer in time.
            PolicyRefused: A sequence is invalid; the message says which limit it exceeds.
        """
        prompts, stops = _prompts_of(data)

        async def all_rows() -> list[GenerationResult]:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._continue(prompt, stop, greedy))
                    for prompt, stop in zip(prompts, stops, strict=True)
                ]
            return [task.result() for task in tasks]

        try:
            # NeMo RL may call this in a thread with a running loop.
            results = self._background.wait(all_rows())
        except* PolicyUnavailable as group:
            raise _first(group) from None
        except* PolicyRefused as group:
            raise _first(group) from None
        return output_batch(batch_class(data), prompts, results, pad_token_id=self._pad())

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        """Continue all sequences of a batch, and yield each as it ends.

        Args:
            data: As of `generate`.

        Yields:
            The number of the sequence, and its output, a batch of one.

        Raises:
            PolicyUnavailable, PolicyRefused: As of `generate`.
        """
        prompts, stops = _prompts_of(data)
        batch_type, pad = batch_class(data), self._pad()

        async def one(row: int) -> tuple[int, GenerationResult]:
            return row, await self._background.run(self._continue(prompts[row], stops[row], greedy))

        tasks = [asyncio.ensure_future(one(row)) for row in range(len(prompts))]
        try:
            for done in asyncio.as_completed(tasks):
                row, result = await done
                yield row, output_batch(batch_type, [prompts[row]], [result], pad_token_id=pad)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _continue(self, prompt: array[int], stop: Sequence[str], greedy: bool) -> GenerationResult:
        session, sampling = uuid.uuid4().hex, self._sampling(len(prompt), stop, greedy)
        policy = await self._open()
        now = asyncio.get_running_loop().time
        deadline = now() + self._patience
        try:
            while True:
                request = GenerationRequest(
                    request_id=uuid.uuid4().hex, session_id=session, token_ids=prompt, sampling=sampling
                )
                try:
                    async with asyncio.timeout_at(deadline):
                        return await policy.generate(request)
                except TimeoutError as error:
                    raise PolicyUnavailable(f"{self._url}: no response within {self._patience:g} s") from error
                except PolicyUnavailable:
                    if now() + _PAUSE_SECONDS >= deadline:
                        raise
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            policy.end_session(session)

    def _sampling(self, prompt: int, stop: Sequence[str], greedy: bool) -> SamplingParameters:
        cfg, window = self.cfg, self.cfg["vllm_cfg"]["max_model_len"]
        if (room := window - prompt) <= 0:
            raise PolicyRefused(
                f"a prompt has {prompt} tokens, and vllm_cfg.max_model_len is {window}: there is no room for a response"
            )
        top_k = cfg.get("top_k")
        return SamplingParameters(
            max_tokens=min(int(cfg["max_new_tokens"]), room),
            temperature=0.0 if greedy else float(cfg["temperature"]),
            top_p=1.0 if greedy else float(cfg["top_p"]),
            top_k=-1 if greedy or top_k is None else int(top_k),
            stop=tuple(dict.fromkeys([*(cfg.get("stop_strings") or ()), *stop])),
            stop_token_ids=tuple(cfg.get("stop_token_ids") or ()),
        )

    async def _open(self) -> RoutedPolicy:
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._policy is None:
                stack = AsyncExitStack()
                asking = await stack.enter_async_context(ServeClient(self._url, limit=1, token=self._token))
                self._policy = await stack.enter_async_context(
                    RoutedPolicy(
                        EndpointDiscovery(asking, self._url),
                        lambda url: ServeClient(url, limit=_CONNECTIONS, token=self._token),
                        # A request does not say which trajectory it belongs to.
                        sticky=False,
                        share=0.0,
                    )
                )
                self._stack = stack
        return self._policy

    def _pad(self) -> int:
        return int(self.cfg.get("_pad_token_id", self.cfg.get("pad_token_id", 0)) or 0)

    def shutdown(self) -> bool:
        """Close the connections; the replicas go on. Calling it again does nothing."""
        if (stack := self._stack) is not None:
            self._background.wait(stack.aclose())
        self._background.stop()
        self._connect()
        return True

    def prepare_for_generation(self, *_: Any, **__: Any) -> bool:
        """Do nothing: the replicas are always awake."""
        return True

    def finish_generation(self, *_: Any, **__: Any) -> bool:
        """Do nothing: the replicas have GPUs of their own."""
        return True

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Any]:
        """Refuse: replicas take published weights.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(_NO_COLLECTIVE)

    def update_weights_from_collective(self) -> list[Any]:
        """Refuse: replicas take published weights.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(_NO_COLLECTIVE)

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        """Refuse: replicas take published weights.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(_NO_COLLECTIVE)

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Do nothing: replicas know their model's tensors."""

    def get_inference_world_size(self) -> int | None:
        """None: no collective is formed."""
        return None

    @property
    def requires_kv_scale_sync(self) -> bool:
        """False: scales are the engine's own."""
        return False

    def invalidate_kv_cache(self) -> bool:
        """True: a replica clears its cache whenever it loads weights."""
        return True

    def blocks_training(self) -> bool:
        """False: the replicas have GPUs of their own."""
        return False

    def wake_carries_weight_updates(self) -> bool:
        """False: weights are published."""
        return False

    def attach_fleet_health(self, monitor: Any, selector: Any) -> None:
        """Refuse: the endpoint watches its replicas itself.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "async_rl.generation_fleet_health.enabled: set it to false; the endpoint replaces replicas"
        )

    def clear_logger_metrics(self) -> None:
        """Do nothing: the replicas' metrics are Prometheus's."""

    def get_logger_metrics(self) -> dict[str, Any]:
        """No metrics."""
        return {}

    def snapshot_step_metrics(self) -> None:
        """Do nothing: the replicas' metrics are Prometheus's."""

    def get_step_metrics(self) -> dict[str, float]:
        """No metrics."""
        return {}


_LIVE: Final = frozenset({"_background", "_stack", "_policy", "_opening"})
_NO_COLLECTIVE: Final = (
    "the replicas take published weights, not those of a collective: pass ServedGeneration a weight_synchronizer, such "
    "as PublishedWeights"
)


class PublishedWeights:
    """NeMo RL's `WeightSynchronizer` by publishing."""

    def __init__(self, publish: Callable[[], object]) -> None:
        """
        Args:
            publish: Publishes the policy's present weights, and returns when all replicas serve them: NeMo RL counts on
                one version everywhere.
        """
        self._publish = publish
        self._stale = True

    def sync_weights(
        self,
        *,
        timer: Any = None,  # noqa: ARG002 - NeMo RL's signature; it times the call itself, too
        kv_scales: dict[str, float] | None = None,
    ) -> dict[str, float]:
        """Publish the weights.

        Raises:
            NotImplementedError: With `kv_scales`.
        """
        if kv_scales:
            raise NotImplementedError("kv_scales: replicas compute the scales of their key-value cache themselves")
        self._publish()
        self._stale = False
        return {}

    @property
    def is_stale(self) -> bool:
        """True until weights were published once."""
        return self._stale

    def init_communicator(self) -> None:
        """Do nothing: there is no connection to open."""

    def shutdown(self) -> None:
        """Do nothing: there is no connection to close."""


def output_batch(
    batch_type: type[Any], prompts: Sequence[array[int]], results: Sequence[GenerationResult], *, pad_token_id: int
) -> Any:
    """NeMo RL's `GenerationOutputSpec` of some sequences; see `ServedGeneration.generate`."""
    import torch

    totals = [len(prompt) + len(result.token_ids) for prompt, result in zip(prompts, results, strict=True)]
    shape = len(totals), max(totals, default=0)
    ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    for row, (prompt, result, total) in enumerate(zip(prompts, results, totals, strict=True)):
        ids[row, : len(prompt)] = torch.tensor(prompt.tolist(), dtype=torch.int64)
        ids[row, len(prompt) : total] = torch.tensor(result.token_ids.tolist(), dtype=torch.int64)
        logprobs[row, len(prompt) : total] = torch.tensor(result.logprobs.tolist(), dtype=torch.float32)
    return batch_type(
        {
            "output_ids": ids,
            "logprobs": logprobs,
            "generation_lengths": torch.tensor([len(result.token_ids) for result in results], dtype=torch.long),
            "unpadded_sequence_lengths": torch.tensor(totals, dtype=torch.long),
            "truncated": torch.tensor([result.finish_reason == "length" for result in results], dtype=torch.bool),
        }
    )


def _prompts_of(data: Any) -> tuple[list[array[int]], list[Sequence[str]]]:
    ids: torch.Tensor = data["input_ids"]
    lengths = data["input_lengths"].tolist()
    stops = data.get("stop_strings") or [None] * len(lengths)
    prompts = [array(TOKEN_TYPE, ids[row, :length].tolist()) for row, length in enumerate(lengths)]
    return prompts, [list(stop or ()) for stop in stops]


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
