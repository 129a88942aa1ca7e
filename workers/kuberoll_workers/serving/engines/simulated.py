"""A simulation of an engine's latency and batching, for dry runs, tests, and benchmarks without a GPU."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kuberoll_api.contract import ServeArgs
from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.tokenization import Tokenizer
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.data.tokenizer_files import tokenizer_directory
from kuberoll_workers.policy.interface import (
    EngineInfo,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    SamplingParameters,
)
from kuberoll_workers.serving.engines.interface import OWN_VERSION

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_DEFAULT_WINDOW = 4096
# Ids that every tokenizer has.
_DEFAULT_VOCABULARY = 256
_KEPT_VERSIONS = 16


class Simulated:
    """The Simulated engine: its responses depend on the request's prompt and seed (or id), and on what ends them only.

    Temperature, penalties, structured outputs and the like have no effect.

    Its log-probabilities are exact: 0 for the tokens of a scripted response, which is certain given the draw; that of
    a uniform distribution over the vocabulary for random tokens.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer: str,
        settings: SimulatedEngine,
        engine_args: Mapping[str, Any],
        revision: str | None = None,
        tokenizer_revision: str | None = None,
    ) -> None:
        """`engine_args` are vLLM's; only `max_model_len` is used."""
        self._model = model
        self._tokenizer_source = tokenizer
        self._revision = revision
        self._tokenizer_revision = tokenizer_revision or revision
        self._client: AsyncLLM | None = None
        self._settings = settings
        self._tokenizer: Tokenizer | None = None
        config = _model_config(model)
        self._window = int(engine_args.get("max_model_len") or config.get("max_position_embeddings") or _DEFAULT_WINDOW)
        self._vocabulary = int(config.get("vocab_size") or _DEFAULT_VOCABULARY)
        self._places = asyncio.Semaphore(settings.max_batch)
        # Versions of the weights with the times from which they were served.
        self._versions: list[tuple[float, str]] = [(0.0, OWN_VERSION)]
        self.in_flight = 0

    @classmethod
    def of(cls, args: ServeArgs) -> Simulated:
        """Create it from the Serve application's arguments.

        Raises:
            OSError, ValueError: The model's configuration cannot be read.
        """
        return cls(
            model=args.model,
            tokenizer=args.tokenizer,
            settings=SimulatedEngine.model_validate(args.simulated or {}),
            engine_args=args.engine_args,
            revision=args.revision,
            tokenizer_revision=args.tokenizer_revision,
        )

    async def start(self) -> None:
        tokenizer = await asyncio.to_thread(self._load_tokenizer)
        if self._settings.responses:
            self._tokenizer = tokenizer
        if tokenizer is not None:
            # A model's own vocabulary may be padded with ids that are no tokens.
            self._vocabulary = tokenizer.vocabulary

    def _load_tokenizer(self) -> HuggingFaceTokenizer | None:
        """The tokenizer; None if it is not on this machine, and random tokens do not need it."""
        source = self._tokenizer_source
        if not self._settings.responses and tokenizer_directory(source, self._tokenizer_revision, stored=True) is None:
            return None
        try:
            return HuggingFaceTokenizer.load(source, revision=self._tokenizer_revision)
        except (OSError, ValueError):
            if self._settings.responses:
                raise
            return None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        prompt = len(request.token_ids)
        if prompt > self._window:
            raise PolicyRefused(f"the prompt has {prompt} tokens, the engine's window {self._window}")
        draw = random.Random(_draw_seed(request))
        room = min(request.sampling.max_tokens, self._window - prompt)
        ids, reason = self._answer(request, room, draw)
        began = _now()
        await self._spend(len(ids), draw)
        logprob = 0.0 if self._tokenizer is not None else -math.log(self._vocabulary)
        return GenerationResult(
            token_ids=ids,
            logprobs=array(LOGPROB_TYPE, [logprob]) * len(ids),
            finish_reason=reason,
            policy_versions=version_spans(self._versions, began, _now(), len(ids)),
        )

    async def load_weights(self, uri: str | None, version: str) -> None:  # noqa: ARG002 - there are no weights
        self._versions.append((_now(), version))
        del self._versions[:-_KEPT_VERSIONS]

    def _answer(self, request: GenerationRequest, room: int, draw: random.Random) -> tuple[array[int], FinishReason]:
        if self._tokenizer is not None:
            text = _cut_at_stop(draw.choice(self._settings.responses), request.sampling.stop)
            ids = self._tokenizer.encode(text)
        else:
            length = min(room + 1, 1 + int(draw.expovariate(1 / self._settings.mean_tokens)))
            length = max(length, min(request.sampling.min_tokens, room))
            ids = token_array(draw.choices(range(self._vocabulary), k=length))
        ids = _cut_at_token(ids, request.sampling)
        return (ids, "stop") if len(ids) <= room else (ids[:room], "length")

    async def _spend(self, tokens: int, draw: random.Random) -> None:
        settings = self._settings
        async with self._places:
            self.in_flight += 1
            try:
                median = settings.first_token_seconds + settings.token_seconds * max(0, tokens - 1)
                if median > 0:
                    slowdown = 1 + settings.batch_slowdown * (self.in_flight - 1)
                    await asyncio.sleep(median * slowdown * draw.lognormvariate(0.0, settings.sigma))
            finally:
                self.in_flight -= 1

    async def check_health(self) -> None:
        return None

    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self._model,
            engine="simulated",
            max_model_len=self._window,
            vocab_size=self._vocabulary,
            policy_version=self._versions[-1][1],
            ongoing_requests=self.in_flight,
        )

    async def open_client(self) -> AsyncLLM:
        if self._client is None:
            # Imports of seconds.
            self._client = await asyncio.to_thread(self._make_client)
        return self._client

    def _make_client(self) -> AsyncLLM:
        from kuberoll_workers.serving.engines.simulated_core import open_client

        return open_client(self, model=self._model, tokenizer=self._tokenizer_source, revision=self._revision)

    def check_usable(self) -> None:
        return None

    def note(self, *_: Any, **__: Any) -> None:
        return None

    async def shutdown(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.shutdown()
            # Its destructor calls it once more, at the end of the interpreter, when its module is gone.
            client.shutdown = lambda: None


def version_spans(
    versions: Sequence[tuple[float, str]], began: float, ended: float, tokens: int
) -> tuple[tuple[str, int, int], ...]:
    """Policy version spans of a response whose tokens were generated evenly between two times.

    Args:
        versions: Pairs of time and version served from then on, in order; the first one was served before, too.
    """
    spans: list[tuple[str, int, int]] = []
    for number, (since, version) in enumerate(versions):
        start = round(tokens * _part(since, began, ended)) if number else 0
        last = number + 1 == len(versions)
        end = tokens if last else round(tokens * _part(versions[number + 1][0], began, ended))
        if start < end:
            spans.append((version, start, end))
    return tuple(spans)


def _part(moment: float, began: float, ended: float) -> float:
    if moment <= began:
        return 0.0
    return 1.0 if moment > ended else (moment - began) / (ended - began)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _draw_seed(request: GenerationRequest) -> bytes:
    seed = request.sampling.seed
    # The request's id has its attempt; without a seed a retry draws another response, as with a real engine.
    identity = request.request_id if seed is None else str(seed)
    return hashlib.blake2b(request.token_ids.tobytes(), key=identity.encode()[:64], digest_size=16).digest()


def _cut_at_stop(text: str, stop: Sequence[str]) -> str:
    ends = [position + len(word) for word in stop if (position := text.find(word)) >= 0]
    return text[: min(ends)] if ends else text


def _cut_at_token(ids: array[int], sampling: SamplingParameters) -> array[int]:
    """The ids up to the first one that ends a response."""
    for position, token in enumerate(ids, start=1):
        if token in sampling.stop_token_ids and position > sampling.min_tokens:
            return ids[:position]
    return ids


def _model_config(model: str) -> dict[str, Any]:
    path = Path(model) / "config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text())
    return config if isinstance(config, dict) else {}
