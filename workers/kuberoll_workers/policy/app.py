"""The Ray Serve application around an engine: `kuberoll_workers.policy.app:build`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kuberoll_api.rolloutjob import Generation, SimulatedEngine
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.engines.interface import Engine
from kuberoll_workers.policy.engines.simulated import Simulated
from kuberoll_workers.policy.engines.vllm_engine import VLLMEngine, is_cpu_build, world_size
from kuberoll_workers.policy.interface import PolicyRefused, PolicyUnavailable

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.requests import Request
    from starlette.responses import Response

DEPLOYMENT = "Generation"
IMPORT_PATH = "kuberoll_workers.policy.app:build"
GPU_RESOURCE = "nvidia.com/gpu"

_log = logging.getLogger("ray.serve")

# Serve replaces a replica after the third failure in a row.
_HEALTH_PERIOD_SECONDS = 2.0
_HEALTH_TIMEOUT_SECONDS = 120.0


class AppArgs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All that a replica needs; plain JSON, as Serve's configuration wants it.

    Attributes:
        model, tokenizer: Directory or hub id.
        gpus: GPUs of one replica; None: as many as `engine_args` spread the model over.
    """

    model: str
    tokenizer: str
    engine: str
    revision: str | None = None
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    simulated: dict[str, Any] | None = None
    replicas: int = 1
    max_ongoing_requests: int = 512
    gpus: float | None = None


def app_args(generation: Generation, *, model: str, tokenizer: str) -> AppArgs:
    """The Serve app's arguments for a job's generation.

    Args:
        model, tokenizer: Where they are on the machine that serves.
    """
    simulated = generation.engine == "Simulated"
    gpus = generation.resources.limits.get(GPU_RESOURCE)
    settings = generation.simulated if generation.simulated is not None else SimulatedEngine()
    return AppArgs(
        model=model,
        tokenizer=tokenizer,
        engine=generation.engine,
        revision=generation.model.revision,
        engine_args=generation.engine_args,
        simulated=settings.model_dump(mode="json", by_alias=True) if simulated else None,
        replicas=generation.replicas or 1,
        max_ongoing_requests=generation.max_ongoing_requests,
        gpus=None if gpus is None else float(gpus),
    )


def make_engine(args: AppArgs) -> Engine:
    """The engine that the arguments ask for, not yet started."""
    if args.engine == "Simulated":
        return Simulated(
            model=args.model,
            tokenizer=args.tokenizer,
            settings=SimulatedEngine.model_validate(args.simulated or {}),
            engine_args=args.engine_args,
        )
    return VLLMEngine(model=args.model, tokenizer=args.tokenizer, revision=args.revision, engine_args=args.engine_args)


class GenerationServer:
    """One replica: an engine behind three routes.

    `POST /v1/generate` continues one sequence (see `wire` for the bodies); `GET /healthz` is 200 only when the engine
    can generate; `GET /info` is an `EngineInfo`. Errors have the body `{"error": {"type", "message"}}`.
    """

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._engine = make_engine(msgspec.convert(dict(args), AppArgs))
        await self._engine.start()

    async def __call__(self, request: Request) -> Response:
        route = (request.method, request.url.path.rstrip("/") or "/")
        if route == ("POST", "/v1/generate"):
            return await self._generate(request)
        if route == ("GET", "/healthz"):
            return await self._healthz()
        if route == ("GET", "/info"):
            return _json(200, dataclasses.asdict(self._engine.info()))
        return _error(404, "NotFound", f"{request.method} {request.url.path}: there is no such route")

    async def check_health(self) -> None:
        """Asked by Serve; a replica that raises is replaced."""
        await self._engine.check_health()

    async def _generate(self, request: Request) -> Response:
        from starlette.responses import Response

        try:
            media = wire.media_type(request.headers.get("content-type"))
            result = await self._engine.generate(wire.decode_request(await request.body(), media))
        except wire.WireError as error:
            return _error(415, "UnsupportedMediaType", str(error))
        except PolicyRefused as error:
            return _error(400, "PolicyRefused", str(error))
        except PolicyUnavailable as error:
            return _error(503, "PolicyUnavailable", str(error))
        except Exception as error:
            _log.exception("a request failed")
            return _error(500, type(error).__name__, str(error))
        return Response(wire.encode_result(result, media), media_type=media)

    async def _healthz(self) -> Response:
        try:
            await self._engine.check_health()
        except PolicyUnavailable as error:
            return _error(503, "PolicyUnavailable", str(error))
        return _json(200, {"status": "ok"})

    async def __del__(self) -> None:
        await self._engine.shutdown()


def _json(status: int, content: Any) -> Response:
    from starlette.responses import Response

    return Response(msgspec.json.encode(content), status_code=status, media_type=wire.JSON)


def _error(status: int, kind: str, message: str) -> Response:
    return _json(status, {"error": {"type": kind, "message": message}})


def replica_gpus(args: AppArgs, *, cpu: bool) -> float:
    """GPUs that one replica takes.

    Args:
        cpu: With the CPU build of vLLM it takes none, whatever the job says of the cluster it was written for.
    """
    if cpu or args.engine == "Simulated":
        return 0
    return float(world_size(args.engine_args)) if args.gpus is None else args.gpus


def deployment_options(args: AppArgs, *, gpus: float) -> dict[str, Any]:
    """Serve's options of the deployment; a pure function of the arguments.

    Args:
        gpus: Of one replica.
    """
    return {
        "name": DEPLOYMENT,
        "num_replicas": args.replicas,
        "max_ongoing_requests": args.max_ongoing_requests,
        # The workers bound what can ever wait here; a refusal would only come back later, having cost one of the
        # tries that are meant for real trouble.
        "max_queued_requests": -1,
        "health_check_period_s": _HEALTH_PERIOD_SECONDS,
        "health_check_timeout_s": _HEALTH_TIMEOUT_SECONDS,
        # One line a request is much for turns that may take a millisecond, and the worker has metrics of each.
        "logging_config": {"enable_access_log": False},
        "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus},
    }


def build(args: Mapping[str, Any]) -> Application:
    """The Serve application; `args` are an AppArgs as plain JSON."""
    from ray import serve

    parsed = msgspec.convert(dict(args), AppArgs)
    options = deployment_options(parsed, gpus=replica_gpus(parsed, cpu=is_cpu_build()))
    return serve.deployment(**options)(GenerationServer).bind(dict(args))
