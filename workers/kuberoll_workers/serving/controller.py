"""Access to Ray Serve's controller: replicas and `user_config`.

Serve has no public way to list the ports of its replicas, nor to change only the `user_config` of a running deployment.
All private parts of Serve that KubeRoll uses are in this module, which is tested with a real Serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

_ALL = ("0.0.0.0", "::", None)
_UPDATING = "UPDATING"
_SERVING = ("RUNNING", "PENDING_MIGRATION", _UPDATING)
_LOOK_SECONDS = 0.05
_ACCEPTED_SECONDS = 15.0


class RunningReplica(msgspec.Struct, kw_only=True, frozen=True):
    """A replica that takes requests.

    Attributes:
        id: Never reused.
        url: Its own address, not a proxy's.
    """

    id: str
    url: str


def current_replica_id() -> str:
    """The id of the replica in this process."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def bind_to_loopback() -> None:
    """Bind this replica's port for other deployments to loopback, if all of Ray is on this machine.

    Serve has no setting for it and binds it to all addresses. Call it while the replica is constructed.
    """
    from ray._private.ray_constants import ENABLE_RAY_CLUSTER
    from ray.serve._private import replica

    if not ENABLE_RAY_CLUSTER:
        bind = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, _: bind(server, "127.0.0.1:0")


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


async def get_user_config(application: str, deployment: str) -> Mapping[str, Any] | None:
    """The `user_config` that is set for all replicas; None if there is no such deployment."""
    from ray.serve._private.common import DeploymentID

    config = await _controller().get_deployment_config.remote(DeploymentID(name=deployment, app_name=application))
    return None if config is None else config.user_config


async def set_user_config(application: str, deployment: str, user_config: Mapping[str, Any]) -> None:
    """Change the `user_config` for running and future replicas, and nothing else of the deployment.

    Raises:
        TimeoutError: Serve did not accept it in time.
    """
    configs = await _controller().get_app_configs.remote()
    if application in configs:
        await _apply(configs, application, deployment, user_config)
    else:
        await _deploy_again(application, deployment, user_config)
    async with asyncio.timeout(_ACCEPTED_SECONDS):
        while await get_user_config(application, deployment) != user_config:  # noqa: ASYNC110 - Serve has no event
            await asyncio.sleep(_LOOK_SECONDS)


async def call_each_replica(application: str, deployment: str, method: str, *, seconds: float) -> list[Any]:
    """Call a method on each running replica, whatever its load; return the results.

    Raises:
        TimeoutError: A replica did not respond in time.
    """
    from ray import serve

    # A new handle would not know the replicas yet; Serve caches this one.
    handle = serve.get_deployment_handle(deployment, application)
    async with asyncio.timeout(seconds):
        return list(await handle.broadcast(method).results_async())


def replica_id(actor_name: str) -> str:
    """The id in an actor's name, `SERVE_REPLICA::application#deployment#id`."""
    return actor_name.rpartition("#")[2]


async def _apply(configs: Mapping[str, Any], application: str, deployment: str, user_config: Mapping[str, Any]) -> None:
    """Change an application that was deployed by Serve's REST interface, in the same way."""
    from ray.serve.schema import ServeDeploySchema

    details = await _controller().get_serve_instance_details.remote()
    # All applications: those that are not named are deleted.
    plain = {name: config.model_dump(exclude_unset=True) for name, config in configs.items()}
    changed = plain[application]
    deployments = changed.setdefault("deployments", [])
    named = [given for given in deployments if given["name"] == deployment]
    if not named:
        deployments.append(entry := {"name": deployment})
        named = [entry]
    named[0]["user_config"] = dict(user_config)
    config = {"applications": list(plain.values())}
    if (capacity := details.get("target_capacity")) is not None:
        config["target_capacity"] = capacity
    await _controller().apply_config.remote(ServeDeploySchema.model_validate(config))


async def _deploy_again(application: str, deployment: str, user_config: Mapping[str, Any]) -> None:
    """Deploy as `serve.run` does, with the same code and version, so that no replica is restarted."""
    import ray
    from ray.serve._private.config import DeploymentConfig
    from ray.serve.generated.serve_pb2 import ApplicationArgs, DeploymentArgs, DeploymentRoute

    known = DeploymentRoute.FromString(await _controller().get_deployment_info.remote(deployment, application))
    config = DeploymentConfig.from_proto(known.deployment_info.deployment_config)
    config.user_config = dict(user_config)
    config.version = known.deployment_info.version
    arguments = DeploymentArgs(
        deployment_name=deployment,
        deployment_config=config.to_proto_bytes(),
        replica_config=known.deployment_info.replica_config.SerializeToString(),
        deployer_job_id=ray.get_runtime_context().get_job_id(),
        route_prefix=known.route,
        ingress=True,
    )
    await _controller().deploy_applications.remote(
        {application: [arguments.SerializeToString()]}, {application: ApplicationArgs().SerializeToString()}
    )


def _controller() -> Any:
    from ray.serve.context import _get_global_client

    return _get_global_client()._controller


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
