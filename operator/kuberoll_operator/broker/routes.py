"""The broker over HTTP: `kuberoll_api.sandboxes` says what is asked and answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Final

from aiohttp import web
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from kuberoll_api.sandboxes import WAIT_SECONDS, SandboxAnswer, SandboxName, SandboxRequest, WorkerName, WorkerSandboxes
from kuberoll_operator.broker.broker import Broker
from kuberoll_operator.broker.jobs import Jobs, UnknownWorker, UnusableJob
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.model import Key, Object

MOST_BYTES: Final = 1 << 20
"""Maximum size of a request."""

_JOB: Final = "/v1/jobs/{namespace}/{job}"
_NAME: Final = TypeAdapter[str](SandboxName)
_WAIT: Final = TypeAdapter[float](Annotated[float, Field(allow_inf_nan=False)])
_WORKER: Final = TypeAdapter[str](WorkerName)

_Handler = Callable[[web.Request, Object], Awaitable[web.StreamResponse]]


class BrokerRoutes:
    """Routes of a broker.

    Args:
        ready: True once the broker knows its pods.
    """

    def __init__(self, broker: Broker, jobs: Jobs, ready: Callable[[], bool]) -> None:
        self._broker, self._jobs, self._ready = broker, jobs, ready

    def routes(self) -> list[web.RouteDef]:
        """The routes."""
        return [
            web.get(_JOB, self._known(self._greet)),
            web.put(f"{_JOB}/sandboxes/{{name}}", self._known(self._want)),
            web.get(f"{_JOB}/sandboxes/{{name}}", self._known(self._ending)),
            web.delete(f"{_JOB}/sandboxes/{{name}}", self._known(self._release)),
            web.put(f"{_JOB}/workers/{{name}}", self._known(self._renew)),
        ]

    def _known(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler for the workers of a job alone."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if not self._ready():
                return _error(503, "the broker does not know its pods yet")
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            try:
                if scheme.lower() != "bearer":
                    raise UnknownWorker("the request has no bearer token")
                return await handler(request, await self._jobs.find(_job(request), token.strip()))
            except UnknownWorker as error:
                return _error(401, str(error))
            except (ValidationError, ValueError) as error:
                return _error(400, _mistakes(error))
            except ApiError as error:
                return _error(503, str(error))

        return answer

    async def _greet(self, _: web.Request, job: Object) -> web.StreamResponse:
        try:
            self._jobs.usable(job)
        except UnusableJob as error:
            return _error(409, str(error))
        return web.Response(status=204)

    async def _want(self, request: web.Request, job: Object) -> web.StreamResponse:
        wanted = SandboxRequest.model_validate_json(await request.read())
        name = _NAME.validate_python(request.match_info["name"])
        try:
            context = self._jobs.usable(job)
        except UnusableJob as error:
            return _answer(SandboxAnswer(state="Refused", reason=str(error)))
        return _answer(await self._broker.want(name, wanted, context, seconds=_seconds(request)))

    async def _ending(self, request: web.Request, _: Object) -> web.StreamResponse:
        name = _NAME.validate_python(request.match_info["name"])
        return _answer(await self._broker.ending(name, _job(request), seconds=_seconds(request)))

    async def _release(self, request: web.Request, _: Object) -> web.StreamResponse:
        await self._broker.release(_NAME.validate_python(request.match_info["name"]), _job(request))
        return web.Response(status=204)

    async def _renew(self, request: web.Request, _: Object) -> web.StreamResponse:
        has = WorkerSandboxes.model_validate_json(await request.read())
        worker = _WORKER.validate_python(request.match_info["name"])
        self._broker.renew(_job(request), worker, frozenset(has.names))
        return web.Response(status=204)


def _seconds(request: web.Request) -> float:
    """The time that an answer may take; anything that is not one is refused."""
    seconds: float = _WAIT.validate_python(request.query.get("wait", WAIT_SECONDS))
    return max(0.0, min(seconds, WAIT_SECONDS))


def _job(request: web.Request) -> Key:
    return Key(request.match_info["namespace"], request.match_info["job"])


def _answer(answer: BaseModel) -> web.Response:
    return web.json_response(text=answer.model_dump_json(by_alias=True))


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)


def _mistakes(error: ValidationError | ValueError) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'request'}: {item['msg']}" for item in error.errors(include_url=False)
        )
    return str(error)
