"""vLLM's engine client, as its serving classes see it in a replica: chats continue token-exactly."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.serving.engines.interface import Engine
from kuberoll_workers.serving.openai_api.continuation import ChatMemory, Continuity, Generated
from kuberoll_workers.serving.openai_api.exchange import EXCHANGE, Exchange, VersionSpans

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput


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
        self._engine.check_usable()
        rendered = token_array(prompt["prompt_token_ids"])
        session, ids, continuity = self.continue_prompt(exchange, options.get("session_id"), rendered)
        exchange.continuity = continuity
        if continuity == "realigned":
            prompt = {**prompt, "prompt_token_ids": ids.tolist()}
        whole: dict[int, list[int]] = {}
        async for output in self._client.generate(prompt, params, request_id, **options):
            for sequence in output.outputs:
                if sequence.finish_reason == "error":
                    raise PolicyUnavailable("the engine failed while it generated the response")
                _collect(whole, sequence, params)
                if sequence.finish_reason is None:
                    continue
                spans = sequence.weight_versions or ()
                versions[sequence.index] = [(str(span.version), span.start, span.end) for span in spans]
                sampled = token_array(whole[sequence.index])
                end = sampled[-1] if sampled and self._ends(sampled[-1], sequence.stop_reason) else None
                self._memory.remember(session, Generated(rendered=rendered, ids=ids + sampled, read=len(ids), end=end))
            yield output

    def _ends(self, token: int, stop_reason: int | str | None) -> bool:
        """True if a token ended its response: vLLM names those that end one beside the model's own."""
        return token == stop_reason or (stop_reason is None and token == self._memory.end_token)


def _collect(whole: dict[int, list[int]], sequence: Any, params: SamplingParams) -> None:
    from vllm.sampling_params import RequestOutputKind

    if params.output_kind == RequestOutputKind.DELTA:
        whole.setdefault(sequence.index, []).extend(sequence.token_ids)
    else:
        whole[sequence.index] = list(sequence.token_ids)
