"""The Ray Serve application around an engine: `kuberoll_workers.serving.app:build`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pydantic import TypeAdapter, ValidationError

from kuberoll_api.contract import (
    DEPLOYMENT,
    SCOPES,
    Scope,
    ServeArgs,
    ServeWeights,
    WeightsSource,
    token_variable,
    user_config,
)
from kuberoll_api.model.generation import Weights
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.auth import AccessDenied, authorize, take_tokens
from kuberoll_workers.policy.headers import COMMIT_HEADER, LOAD_HEADER
from kuberoll_workers.policy.interface import GenerationRequest, PolicyRefused, PolicyUnavailable
from kuberoll_workers.serving import controller
from kuberoll_workers.serving.arrivals import Calls
from kuberoll_workers.serving.bodies import BodyRefused, read_body
from kuberoll_workers.serving.engines.interface import OWN_VERSION
from kuberoll_workers.serving.engines.pulse import EngineStalled
from kuberoll_workers.serving.engines.registry import engine_kind
from kuberoll_workers.serving.entrance import Entrance, Rules
from kuberoll_workers.serving.executor import BoundedExecutor
from kuberoll_workers.serving.openai_api import OpenAIRoutes
from kuberoll_workers.serving.publications import Publications, VersionTaken
from kuberoll_workers.serving.ray_store import RayStore
from kuberoll_workers.serving.replicas import ReplicaList
from kuberoll_workers.serving.sessions.routes import PREFIX, SessionRoutes
from kuberoll_workers.serving.slow_clients import limit_headers
from kuberoll_workers.serving.weights import LiveWeights, WeightsFollower, configured_weights, version_of

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.requests import Request
    from starlette.responses import Response

REPLICA_HEADER = "x-kuberoll-replica"
"""Response header: the id of the replica."""

_log = logging.getLogger("ray.serve")

# Serve replaces a replica after the third failure in a row.
_HEALTH_PERIOD_SECONDS = 2.0
_HEALTH_TIMEOUT_SECONDS = 120.0
# Requests go elsewhere long before; a new engine needs minutes, and has none of this one's work.
_REPLACE_SECONDS = 120.0
# Interval at which a stopping replica checks for requests in flight.
_DRAIN_LOOK_SECONDS = 0.5
_ASK_REPLICAS_SECONDS = 10.0
_MAX_WEIGHTS_BYTES = 64 << 10
# Longer bodies are parsed in a thread.
_SHORT_BYTES = 256 << 10


_ARGS: Final = TypeAdapter(ServeArgs)


def read_args(args: Mapping[str, Any]) -> ServeArgs:
    """Parse the application's arguments from Serve's configuration.

    Raises:
        ValidationError: They do not match `ServeArgs`.
    """
    return _ARGS.validate_python(dict(args))


class GenerationServer:
    """One replica: an engine behind a few routes.

    `POST /v1/generate` continues one sequence (see `wire` for the bodies); `GET /healthz` is 200 only when the engine
    can generate; `GET /info` is an `EngineInfo`; `GET /replicas` lists the replicas; `/v1/weights` reads and changes
    the weights of all of them; `/sessions` captures what agents sample. The other paths are those of vLLM's API. Errors
    have the body `{"error": {"type", "message"}}`.
    """

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._args = read_args(args)
        limit_headers()
        controller.bind_to_loopback()
        # Before the engine starts: its processes need no tokens.
        self._tokens = take_tokens(os.environ)
        if self._tokens is None and self._args.tokens_required:
            raise ValueError(f"{', '.join(map(token_variable, SCOPES))}: not set, but this policy requires tokens")
        self._id = controller.current_replica_id()
        self._engine = engine_kind(self._args.engine).make(self._args)
        self._weights = LiveWeights(self._engine)
        application = self._args.application
        self._publications = Publications(RayStore(controller.store_prefix(application)))
        self._follower = WeightsFollower(self._publications, self._weights, args)
        self._executor = BoundedExecutor()
        self._openai = OpenAIRoutes(
            self._engine,
            model_name=self._args.model_name or self._args.model,
            tool_parser=self._args.tool_call_parser,
            reasoning_parser=self._args.reasoning_parser,
            chat_template=self._args.chat_template,
            template_variables=self._args.chat_template_kwargs,
            executor=self._executor,
        )
        self._sessions = SessionRoutes(self._openai, replica=self._id, address=self._own_address)
        self._loop = asyncio.get_running_loop()
        rules = Rules(
            authorize=self._authorize,
            session=self._sessions.called,
            spender=self._spender,
            health=self._health_from_entrance,
            calls=Calls(self._args.max_ongoing_requests),
        )
        controller.wrap_requests(Entrance, rules=rules)
        self._begun = False
        self._commit: str | None = None
        self._ongoing = 0
        self._calls: set[asyncio.Task[Any]] = set()
        self._replicas = ReplicaList(
            self._running_replicas,
            lambda: controller.serving_replicas(application, DEPLOYMENT),
        )
        await self._engine.start()
        self._commit = self._engine.info().commit

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Apply the `user_config`; Serve calls this before a new replica is ready, and at each change."""
        configured = configured_weights(config)
        if self._begun:
            # Serve does not list a replica while this call runs, and stops it on an error: load in the background.
            self._follower.configure(configured)
        else:
            await self._follower.start(configured)

    async def check_health(self) -> None:
        """Check the engine; Serve replaces a replica that raises."""
        # Serve calls this only after the replica is initialized.
        self._begun = True
        self._follower.follow_soon()
        try:
            await self._engine.check_health()
        except EngineStalled as error:
            if error.seconds >= _REPLACE_SECONDS:
                raise

    async def follow_weights(self) -> None:
        """Read which weights were published last, for other replicas."""
        self._follower.follow_soon()

    async def weights_state(self) -> dict[str, Any]:
        """The replica's id, the version that it serves, and the problem with the wanted one, for other replicas."""
        return {"id": self._id, "version": self._weights.served_version, "problem": self._weights.problem}

    async def __call__(self, request: Request) -> Response:
        from kuberoll_workers.serving.openai_api.mounted import Mounted

        self._ongoing += 1
        try:
            response = await self._answer(request)
        except Exception as error:
            # Serve would answer in plain text.
            _log.exception("%s %s failed", request.method, request.url.path)
            response = _error(500, type(error).__name__, str(error))
        finally:
            self._ongoing -= 1
        if isinstance(response, Mounted):
            response.while_sent(self._counted)
        response.headers[LOAD_HEADER] = str(self._ongoing)
        response.headers[REPLICA_HEADER] = self._id
        return self._with_commit(response)

    def _with_commit(self, response: Response) -> Response:
        if self._commit is not None:
            response.headers[COMMIT_HEADER] = self._commit
        return response

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._ongoing += 1
        try:
            yield
        finally:
            self._ongoing -= 1

    async def _answer(self, request: Request) -> Response:
        method, path = request.method, request.url.path.rstrip("/") or "/"
        if (method, path) == ("GET", "/healthz"):
            return await self._healthz()
        try:
            self._authorize(request, path)
        except AccessDenied as error:
            return _error(error.status, "Unauthorized" if error.status == 401 else "Forbidden", str(error))
        if (method, path) == ("POST", "/v1/generate"):
            return await self._generate(request)
        if (method, path) == ("GET", "/info"):
            info = dataclasses.replace(self._engine.info(), max_ongoing_requests=self._args.max_ongoing_requests)
            return _json(200, dataclasses.asdict(info))
        if (method, path) == ("GET", "/replicas"):
            return _json(200, {"replicas": await self._replicas.read(), "version": self._weights.served_version})
        if path == "/v1/weights" and method in ("GET", "POST"):
            return await (self._change_weights(request) if method == "POST" else self._show_weights())
        for routes in (self._sessions, self._openai):
            if (response := await routes.handle(request, path)) is not None:
                return response
        return _error(404, "NotFound", f"{method} {request.url.path}: there is no such route")

    def _authorize(self, request: Request, path: str) -> None:
        """Check that a request may use a route.

        Raises:
            AccessDenied: It may not.
        """
        # A session's own token opens that session, and nothing else.
        if self._spender(request, path) is None:
            authorize(_authorization(request.headers), self._tokens, _scope(request.method, path))

    def _spender(self, request: Request, path: str) -> str | None:
        """The session to which a path belongs, if the request has its token."""
        token = (_authorization(request.headers) or "").partition(" ")[2].strip()
        return self._sessions.session_of(path, token) if token else None

    async def _running_replicas(self) -> list[controller.RunningReplica]:
        found = await controller.running_replicas(self._args.application)
        own = self._args.own_url
        return found if own is None else [msgspec.structs.replace(replica, url=own) for replica in found]

    async def _own_address(self) -> str | None:
        """This replica's own URL; None if Serve gives it none."""
        if self._args.own_url is not None:
            return self._args.own_url
        return next((found.url for found in await self._replicas.read() if found.id == self._id), None)

    async def _generate(self, request: Request) -> Response:
        from starlette.responses import Response

        try:
            media = wire.media_type(request.headers.get("content-type"))
            result = await self._engine.generate(await self._decoded(await read_body(request), media))
        except wire.WireError as error:
            return _error(415, "UnsupportedMediaType", str(error))
        except BodyRefused as error:
            return _error(error.status, "BodyRefused", str(error))
        except PolicyRefused as error:
            return _error(400, "PolicyRefused", str(error))
        except PolicyUnavailable as error:
            return _error(503, "PolicyUnavailable", str(error))
        except Exception as error:
            _log.exception("a request failed")
            return _error(500, type(error).__name__, str(error))
        return Response(wire.encode_result(result, media), media_type=media)

    async def _decoded(self, body: bytes, media: str) -> GenerationRequest:
        if len(body) <= _SHORT_BYTES:
            return wire.decode_request(body, media)
        return await self._executor.run(wire.decode_request, body, media)

    async def _healthz(self) -> Response:
        try:
            await self._engine.check_health()
        except PolicyUnavailable as error:
            return _error(503, "PolicyUnavailable", str(error))
        return _json(200, {"status": "ok"})

    async def _health_from_entrance(self) -> Response:
        # Serve runs this class in a loop of its own thread, and the entrance in its own.
        response = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._healthz(), self._loop))
        return self._with_commit(response)

    async def _show_weights(self) -> Response:
        application = self._args.application
        wanted = await self._follower.follow()
        silent = dict.fromkeys(await controller.serving_replicas(application, DEPLOYMENT))
        states = await controller.call_each_replica(
            application, DEPLOYMENT, "weights_state", seconds=_ASK_REPLICAS_SECONDS
        )
        states.append(await self.weights_state())
        weights = ServeWeights(
            wanted=version_of(wanted),
            replicas={**silent, **{state["id"]: state["version"] for state in states}},
            problems={state["id"]: state["problem"] for state in states if state["problem"] is not None},
        )
        return _json(200, weights)

    async def _change_weights(self, request: Request) -> Response:
        try:
            body = await read_body(request, max_bytes=_MAX_WEIGHTS_BYTES)
            if _names_own_weights(body):
                return await self._publish(None)
            given = Weights.model_validate_json(body)
        except BodyRefused as error:
            return _error(error.status, "BodyRefused", str(error))
        except ValidationError as error:
            return _error(400, "BadRequest", f"the body must be a uri and a version: {error}")
        if given.version == OWN_VERSION:
            return _error(
                400,
                "BadRequest",
                f"version {OWN_VERSION} is the model's own; use another version for these weights, "
                'or {"uri": null, "version": "0"} to return to the model\'s own',
            )
        return await self._publish(WeightsSource(uri=given.uri, version=given.version))

    async def _publish(self, wanted: WeightsSource | None) -> Response:
        try:
            await asyncio.to_thread(self._publications.publish, wanted)
        except VersionTaken as error:
            return _error(409, "Conflict", str(error))
        self._tell_replicas()
        return _json(202, {"version": version_of(wanted)})

    def _tell_replicas(self) -> None:
        """Have all replicas follow at once; one that does not hear of it follows at its next health check."""
        call = controller.call_each_replica(
            self._args.application, DEPLOYMENT, "follow_weights", seconds=_ASK_REPLICAS_SECONDS
        )
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        self._follower.follow_soon()

    async def __del__(self) -> None:
        self._executor.close()
        await self._follower.stop()
        await self._engine.shutdown()


def _names_own_weights(body: bytes) -> bool:
    """True if the body of a request wants the model's own weights back."""
    try:
        return bool(msgspec.json.decode(body) == {"uri": None, "version": OWN_VERSION})
    except msgspec.MsgspecError:
        return False


def _authorization(headers: Mapping[str, str]) -> str | None:
    """The Authorization header, or what Anthropic's clients send in its place."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")


def _scope(method: str, path: str) -> Scope:
    """The token scope that a request needs."""
    if method in ("GET", "HEAD") and not path.startswith(PREFIX):
        return "read"
    return "weights" if path == "/v1/weights" else "generate"


def _json(status: int, content: Any) -> Response:
    from starlette.responses import Response

    return Response(msgspec.json.encode(content), status_code=status, media_type=wire.JSON)


def _error(status: int, kind: str, message: str) -> Response:
    return _json(status, {"error": {"type": kind, "message": message}})


def replica_gpus(args: ServeArgs, *, on_gpus: bool) -> float:
    """Number of GPUs of one replica, in all its pods.

    Args:
        on_gpus: Whether the engine computes on GPUs on this machine; else it takes none, whatever the job requests.
    """
    if not on_gpus:
        return 0
    if args.bundles is not None:
        return sum(bundle.get("GPU", 0) for bundle in args.bundles)
    return float(engine_kind(args.engine).world_size(args.engine_args)) if args.gpus is None else args.gpus


def max_replicas(args: ServeArgs) -> int:
    """Maximum number of replicas."""
    return args.replicas if args.autoscaling is None else int(args.autoscaling["max_replicas"])


def deployment_options(args: ServeArgs, *, gpus: float) -> dict[str, Any]:
    """Serve's options for the deployment; a pure function of the arguments.

    Args:
        gpus: GPUs of one replica.
    """
    return {
        "name": DEPLOYMENT,
        **_scale(args),
        "max_ongoing_requests": args.max_ongoing_requests,
        # The workers limit how many requests can wait here; a refusal would only use up attempts that are meant for
        # real failures.
        "max_queued_requests": -1,
        "health_check_period_s": _HEALTH_PERIOD_SECONDS,
        "health_check_timeout_s": _HEALTH_TIMEOUT_SECONDS,
        "graceful_shutdown_wait_loop_s": _DRAIN_LOOK_SECONDS,
        # As long as a turn may take: Serve's default would abort most turns.
        "graceful_shutdown_timeout_s": args.drain_seconds,
        # A log line per request costs too much for turns of a millisecond, and the worker has metrics of each.
        "logging_config": {"enable_access_log": False},
        **_place(args, gpus),
        # Always set: Serve then calls `reconfigure`, in which a new replica loads its weights before it is ready.
        "user_config": user_config(args.weights),
    }


def _scale(args: ServeArgs) -> dict[str, Any]:
    if args.autoscaling is None:
        return {"num_replicas": args.replicas}
    # Only the load during the delay counts, not that of the half minute before.
    look_back = max(2.0, min(30.0, float(args.autoscaling.get("upscale_delay_s", 30.0))))
    return {"autoscaling_config": {"look_back_period_s": look_back, **args.autoscaling}}


def _place(args: ServeArgs, gpus: float) -> dict[str, Any]:
    if args.bundles is None or gpus == 0:
        return {"ray_actor_options": {"num_cpus": 1, "num_gpus": gpus}}
    return {
        # The engine's workers take the GPUs, one in each bundle; the first bundle has a CPU for the replica, too.
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 0},
        "placement_group_bundles": args.bundles,
        "placement_group_strategy": "PACK",
    }


def build(args: Mapping[str, Any]) -> Application:
    """Build the Serve application; `args` are `ServeArgs` as plain JSON."""
    from ray import serve

    parsed = read_args(args)
    options = deployment_options(parsed, gpus=replica_gpus(parsed, on_gpus=engine_kind(parsed.engine).on_gpus()))
    return serve.deployment(**options)(GenerationServer).bind(dict(args))
