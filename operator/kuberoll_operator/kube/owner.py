"""Who owns the pod that the operator runs in, so that the lease goes when the operator is uninstalled.

Helm removes the operator's rights together with its Deployment: at its end the operator could not remove the lease
itself. Kubernetes does, once the owner is gone.
"""

from __future__ import annotations

import logging

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.kube.resources import PODS
from kuberoll_operator.model import Object

_log = logging.getLogger(__name__)


async def owner_of_pod(client: Client, namespace: str, pod: str | None) -> Object | None:
    """The owner reference of a pod's controller, its ReplicaSet; None where there is none, or it cannot be read.

    Args:
        pod: Name; None: the operator does not run in a pod.
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
