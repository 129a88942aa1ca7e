"""Owner of the operator's pod, so that the lease is deleted when the operator is uninstalled.

Helm removes the operator's role together with its Deployment, so the operator could not delete the lease itself when it
stops. Kubernetes does so once the owner is gone.
"""

from __future__ import annotations

import logging

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.kube.resources import PODS
from kuberoll_operator.model import Object

_log = logging.getLogger(__name__)


async def owner_of_pod(client: Client, namespace: str, pod: str | None) -> Object | None:
    """Owner reference of a pod's controller, its ReplicaSet; None if there is none, or it cannot be read.

    Args:
        pod: Name of the pod; None if the operator does not run in a pod.
    """
    if pod is None:
        return None
    try:
        found = await client.get(PODS, namespace, pod)
    except ApiError as error:
        _log.warning("the lease will not be removed with the operator: %s", error)
        return None
    owners = () if found is None else found["metadata"].get("ownerReferences") or ()
    controller = next((owner for owner in owners if owner.get("controller")), None)
    return None if controller is None else {key: controller[key] for key in ("apiVersion", "kind", "name", "uid")}
