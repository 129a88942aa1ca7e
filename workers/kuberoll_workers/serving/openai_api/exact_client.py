"""vLLM's engine client, as its serving classes see it in a replica: chats continue token-exactly."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.sampling import distribution_of
from kuberoll_workers.policy.interface import PolicyError, PolicyRefused, PolicyUnavailable
from kuberoll_workers.policy.responses import unfinished, unusable
from kuberoll_workers.serving.engines.faults import fault_of
from kuberoll_workers.serving.engines.interface import Engine
from kuberoll_workers.serving.engines.prompt_scores import scores_prompts
from kuberoll_workers.serving.engines.spot_check import response_of
from kuberoll_workers.serving.openai_api.continuation import ChatMemory, Continuity, Generated
from kuberoll_workers.serving.openai_api.exchange import EXCHANGE, Exchange, Sampled, VersionSpans

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput


_WHOLE: Final = (None, "stop", "length")
"""What vLLM says of responses that go on, or that ended as the request wanted."""


class Continued(NamedTuple):
    """A prompt in its session."""

    session: str
    ids: array[int]
    continuity: Continuity


class ExactClient:
    """A client with the engine's own methods, but that prompts begin with what was sampled before in their session."""

    def __init__(self, client: EngineClient, engine: Engine, memory: ChatMemory) -> None:
        """
        Args:
            engine: Says whether the engine may be used.
        """
        self._client, self._engine, self._memory = client, engine, memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def continue_prompt(self, exchange: Exchange, session: str | None, rendered: array[int]) -> Continued:
        """Find the ids that the model reads for a prompt.

        Args:
            session: Session that the body names; None: none.
            rendered: The prompt as the chat template and the tokenizer gave it.
        """
        found = exchange.session or session or self._memory.session_of(rendered)
        return Continued(found, *self._memory.continue_chat(found, rendered))

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as the engine does; see `EngineClient.generate`.

        Raises:
            PolicyUnavailable: The engine is broken, or it failed.
            VLLMValidationError: The request is at fault, in vLLM's type for its API's errors.
        """
        exchange = EXCHANGE.get(None) or Exchange(session=None)
        # Now, and not when the first output is awaited: calls are in the order of the request's prompts.
        versions: dict[int, VersionSpans] = {}
        exchange.calls.append(versions)
        return self._generate(prompt, sampling_params, request_id, options, exchange, versions)

    async def _generate(
        self,
        prompt: Mapping[str, Any],
        params: SamplingParams,
        request_id: str,
        options: Mapping[str, Any],
        exchange: Exchange,
        versions: dict[int, VersionSpans],
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            self._engine.check_usable()
        except PolicyUnavailable:
            exchange.aborted = True
            raise
        rendered = token_array(prompt["prompt_token_ids"])
        session, ids, continuity = self.continue_prompt(exchange, options.get("session_id"), rendered)
        exchange.continuity = continuity
        if continuity == "realigned":
            prompt = {**prompt, "prompt_token_ids": ids.tolist()}
        if params.prompt_logprobs is not None and not scores_prompts(self._client.vllm_config):
            raise _for_api(
                PolicyRefused("prompt_logprobs: vLLM has none on CPUs with spec.generation.engineArgs.enable_lora")
            )
        if exchange.recorded is not None:
            exchange.recorded.admit(params, len(ids))
            exchange.admitted += 1
        structured = params.structured_outputs is not None
        if params.logprobs is None and (exchange.recorded is not None or structured):
            # Of the sampled tokens; the answer has none that were not asked for.
            params.logprobs = 0
        distribution = distribution_of(params)
        began = time.time()
        parts: dict[int, _Response] = {}
        async for output in self._outputs(prompt, params, request_id, options):
            for sequence in output.outputs:
                if sequence.finish_reason not in _WHOLE:
                    fault = unfinished(sequence.finish_reason, structured=structured)
                    if isinstance(fault, PolicyRefused):
                        raise _for_api(fault)
                    # An abort, by whatever it was caused: part of a response is none.
                    exchange.aborted = True
                    raise fault
                response = parts.setdefault(sequence.index, _Response())
                logprobs = response.add(sequence, params)
                if structured and (error := unusable(logprobs, structured=True)) is not None:
                    raise _for_api(error)
                if sequence.finish_reason is None:
                    continue
                spans = sequence.weight_versions or ()
                versions[sequence.index] = [(str(span.version), span.start, span.end) for span in spans]
                end = response.ids[-1] if response.ids and self._ends(response.ids[-1], sequence.stop_reason) else None
                sampled = token_array(response.ids)
                if len(response.logprobs) == len(sampled):
                    self._engine.note(
                        response_of(ids, sampled, response.logprobs, versions[sequence.index]),
                        distribution,
                        # The prompt of several responses is computed once.
                        computed=len(sampled) + (sequence.index == 0) * (len(ids) - (output.num_cached_tokens or 0)),
                    )
                if exchange.recorded is None or not exchange.recorded.closed:
                    self._memory.remember(
                        session,
                        Generated(rendered=rendered, ids=ids + sampled, read=len(ids), end=end, demand=exchange.demand),
                    )
                if exchange.recorded is not None:
                    exchange.add(
                        Sampled(
                            prompt=ids,
                            response=sampled,
                            logprobs=array(LOGPROB_TYPE, response.logprobs),
                            versions=versions[sequence.index],
                            finish_reason=sequence.finish_reason,
                            continuity=continuity,
                            began=began,
                            ended=time.time(),
                            chat=exchange.chat,
                            tools=exchange.tools,
                            demand=exchange.demand,
                            distribution=distribution,
                        )
                    )
            yield output

    async def _outputs(
        self, prompt: Any, params: SamplingParams, request_id: str, options: Mapping[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs; an error that is the request's fault comes as one of vLLM's for such."""
        from vllm.v1.engine.exceptions import EngineGenerateError

        try:
            async for output in self._client.generate(prompt, params, request_id, **options):
                yield output
        except EngineGenerateError as error:
            fault = fault_of(error, dead=str(error) if self._client.errored else None)
            raise (_for_api(fault) if isinstance(fault, PolicyRefused) else error) from error

    def _ends(self, token: int, stop_reason: int | str | None) -> bool:
        """True if a token ended its response: vLLM names those that end one beside the model's own."""
        return token == stop_reason or (stop_reason is None and token == self._memory.end_token)


def _for_api(error: PolicyError) -> Exception:
    """The exception that vLLM's API answers as it should: a refusal with 400."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(str(error)) if isinstance(error, PolicyRefused) else error


class _Response:
    """The ids and log-probabilities of one sequence, as far as they have come."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    def add(self, sequence: Any, params: SamplingParams) -> list[float]:
        """Add an output; return its log-probabilities."""
        from vllm.sampling_params import RequestOutputKind

        ids = list(sequence.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(ids, sequence.logprobs or (), strict=False)]
        if params.output_kind == RequestOutputKind.DELTA:
            self.ids += ids
            self.logprobs += logprobs
        else:
            self.ids, self.logprobs = ids, logprobs
        return logprobs
