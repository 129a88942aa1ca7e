"""Access to Ray Serve's controller and the replicas that it manages.

Serve has no public way to list the ports of its replicas. All private parts of Serve that KubeRoll uses are in this
module, which is tested with a real Serve.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, wait
from typing import Any

import msgspec

_ALL = ("0.0.0.0", "::", None)
_UPDATING = "UPDATING"
_LOOK_SECONDS = 0.05
_SERVING = ("RUNNING", "PENDING_MIGRATION", _UPDATING)


class RunningReplica(msgspec.Struct, kw_only=True, frozen=True):
    """A replica that takes requests.

    Attributes:
        id: Never reused.
        url: Its own address, not a proxy's.
    """

    id: str
    url: str


def start_serve(address: str, port: int) -> Future[None]:
    """Start Serve; return as soon as it accepts applications.

    Its proxies start meanwhile: an engine takes longer, and need not wait for them.

    Returns:
        Done when the proxies are ready, or with their error.
    """
    from ray import serve
    from ray.serve._private import client
    from ray.serve.config import HTTPOptions

    # Serve looks every second whether an application runs.
    client.CLIENT_POLLING_INTERVAL_S = _LOOK_SECONDS
    started: Future[None] = Future()

    def start() -> None:
        try:
            serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=address, port=port))
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)

    threading.Thread(target=start, name="kuberoll-serve", daemon=True).start()
    while not started.done() and not _controller_answers():
        wait([started], timeout=_LOOK_SECONDS)
    if started.done():
        started.result()
    return started


def _controller_answers() -> bool:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        # In its constructor until then.
        ray.get(ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE).check_alive.remote())
    except ValueError:
        return False
    return True


def current_replica_id() -> str:
    """The id of the replica in this process."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def store_prefix(application: str) -> str:
    """Prefix of an application's keys in Ray's store, as long as Serve runs: another Serve has other keys."""
    # A controller whose process is restarted keeps its id.
    return f"{_controller()._actor_id.hex()}/{application}"


def bind_to_loopback() -> None:
    """Bind this replica's port for other deployments to loopback, if all of Ray is on this machine.

    Serve has no setting for it and binds it to all addresses. Call it while the replica is constructed.
    """
    from ray._private.ray_constants import ENABLE_RAY_CLUSTER
    from ray.serve._private import replica

    if not ENABLE_RAY_CLUSTER:
        bind = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, _: bind(server, "127.0.0.1:0")


def wrap_requests(middleware: Any, **options: Any) -> None:
    """Have all requests at this replica's own port pass through an ASGI middleware before Serve gives them a place.

    Serve takes middlewares only from an environment variable, which would have to be set on every node. Call it while
    the replica is constructed.
    """
    from ray.serve._private import replica
    from starlette.middleware import Middleware

    configure = replica.configure_http_middlewares

    def configured(given: Any) -> Any:
        found = configure(given)
        found.middlewares.append(Middleware(middleware, **options))
        return found

    replica.configure_http_middlewares = configured


async def running_replicas(application: str) -> list[RunningReplica]:
    """The replicas of an application; empty if Serve gives them no ports, as without HAProxy."""
    from ray.serve._private.constants import RAY_SERVE_ENABLE_DIRECT_INGRESS

    if not RAY_SERVE_ENABLE_DIRECT_INGRESS:
        return []
    groups = await _controller().get_target_groups.remote(application, from_proxy_manager=True)
    # Replicas listen at the proxy's address; they are at the node's address only if that is all addresses.
    host = (await _controller().get_http_config.remote()).host
    return [
        RunningReplica(
            id=replica_id(target.name), url=f"http://{_host(target.ip if host in _ALL else host)}:{target.port}"
        )
        for group in groups
        if group.protocol == "HTTP"
        for target in group.targets
    ]


async def serving_replicas(application: str, deployment: str) -> dict[str, bool]:
    """Ids of all replicas that take requests, with True for those that are being given a changed `user_config`.

    Serve neither lists nor calls such a replica meanwhile, although it responds as before.
    """
    details = await _controller().get_serve_instance_details.remote()
    found = details["applications"].get(application, {}).get("deployments", {}).get(deployment, {})
    return {
        replica["replica_id"]: replica["state"] == _UPDATING
        for replica in found.get("replicas", [])
        if replica["state"] in _SERVING
    }


async def call_each_replica(application: str, deployment: str, method: str, *, seconds: float) -> list[Any]:
    """Call a method on each running replica, whatever its load; return the results of those that responded in time."""
    from ray import serve
    from ray.serve.exceptions import DeploymentUnavailableError

    # A new handle would not know the replicas yet; Serve caches this one.
    handle = serve.get_deployment_handle(deployment, application)
    try:
        async with asyncio.timeout(seconds):
            results = await handle.broadcast(method).results_async(return_exceptions=True)
    except (TimeoutError, DeploymentUnavailableError):
        # Serve calls no replica while it passes a changed `user_config` to all of them.
        return []
    return [result for result in results if not isinstance(result, BaseException)]


def replica_id(actor_name: str) -> str:
    """The id in an actor's name, `SERVE_REPLICA::application#deployment#id`."""
    return actor_name.rpartition("#")[2]


def _controller() -> Any:
    from ray.serve.context import _get_global_client

    return _get_global_client()._controller


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
