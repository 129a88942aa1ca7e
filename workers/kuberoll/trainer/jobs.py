"""A RolloutJob of a cluster, by its name: where its trajectories are, and how its policy gets new weights.

It needs the package `kubernetes`: `pip install 'kuberoll[trainer,cluster]'`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kuberoll.trainer.endpoint import EndpointError, ServedWeights
from kuberoll.trainer.workers import Workers
from kuberoll_api import conditions
from kuberoll_api.contract import PROGRESS_PORT
from kuberoll_api.model.rolloutjob import GROUP, VERSION
from kuberoll_workers.output.run_files import NotARun

SCHEME: Final = "rolloutjob://"

_PLURAL: Final = "rolloutjobs"
_OWN_VERSION: Final = "0"
# The operator says how many replicas have which version, not which.
_ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class JobWeights:
    """The weights of a RolloutJob's policy, as its `spec.weights` asks for them.

    In place of a `PolicyEndpoint`: what is published stays the job's wish when its engines are replaced.

    Attributes:
        api: A `kubernetes.client.CustomObjectsApi`.
    """

    api: Any
    namespace: str
    name: str

    def job(self) -> Mapping[str, Any]:
        """The RolloutJob.

        Raises:
            EndpointError: It cannot be read; the message has the API server's words.
        """
        try:
            found: Mapping[str, Any] = self.api.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, _PLURAL, self.name
            )
        except Exception as error:
            raise self._error("read", error) from error
        return found

    def weights(self) -> ServedWeights:
        """Read which versions are served, as far as the operator knows.

        Raises:
            EndpointError: The job cannot be read, or has no policy any more.
        """
        job = self.job()
        status = job.get("status") or {}
        for ended in (conditions.COMPLETE, conditions.FAILED):
            if _condition(status, ended).get("status") == "True":
                raise EndpointError(f"{self}: it is over: {_condition(status, ended).get('message', ended)}")
        wanted = str(((job.get("spec") or {}).get("weights") or {}).get("version") or _OWN_VERSION)
        served = (status.get("generation") or {}).get("policyVersion")
        if status.get("observedGeneration") != job["metadata"]["generation"]:
            return ServedWeights(wanted=wanted, replicas={_ALL: None})
        loading = _condition(status, conditions.WEIGHTS_SERVED)
        problem = ""
        if loading.get("reason") == conditions.Reason.WEIGHTS_LOADING:
            problem = str(loading.get("message", "")).partition("; ")[2]
        return ServedWeights(
            wanted=wanted,
            replicas={_ALL: None if served is None else str(served)},
            problems={_ALL: problem} if problem else {},
        )

    def serve(self, uri: str | None, version: str) -> None:
        """Have all replicas serve a version: change `spec.weights`.

        Args:
            uri: As the job's pods see it; None: the model's own weights.

        Raises:
            EndpointError: The job cannot be changed.
        """
        weights = None if uri is None else {"uri": uri, "version": version}
        try:
            self.api.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                _PLURAL,
                self.name,
                {"spec": {"weights": weights}},
                _content_type="application/merge-patch+json",
            )
        except Exception as error:
            raise self._error("change", error) from error

    def workers(self, token: str) -> Workers:
        """The job's workers, for the direct path: all addresses of their Service, as a pod of the cluster sees it.

        Args:
            token: Of the scope `read`.
        """
        return Workers(f"{self.name}-workers.{self.namespace}.svc:{PROGRESS_PORT}", token=token)

    def _error(self, what: str, error: Exception) -> EndpointError:
        status = getattr(error, "status", None)
        words = getattr(error, "reason", None) or f"{type(error).__name__}: {error}"
        hint = ""
        if status == 403:
            hint = "; this account needs the verbs get and patch of rolloutjobs.kuberoll.io"
        return EndpointError(f"{self}: cannot {what} it: {words}{hint}", status=status)

    def __str__(self) -> str:
        return f"{SCHEME}{self.namespace}/{self.name}"


def find_job(location: str) -> JobWeights:
    """A job by its location `rolloutjob://NAMESPACE/NAME`, in the cluster of this pod or of the kubeconfig.

    Raises:
        NotARun: The location is malformed, the package is missing, or no cluster is configured.
    """
    namespace, _, name = location.removeprefix(SCHEME).partition("/")
    if not namespace or not name or "/" in name:
        raise NotARun(f"{location}: expected {SCHEME}NAMESPACE/NAME")
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise NotARun(
            f"{location}: jobs are found with the package kubernetes: pip install 'kuberoll[trainer,cluster]', or open "
            "the job's output"
        ) from error
    try:
        load: Any = config.load_config
        # The package itself reads the variable only once, when it is imported.
        load(**({"config_file": path} if (path := os.environ.get("KUBECONFIG")) else {}))
    except Exception as error:
        raise NotARun(f"{location}: no cluster is configured here: {error}") from error
    return JobWeights(client.CustomObjectsApi(), namespace, name)


def output_of(job: JobWeights, directory: str | None) -> str:
    """Where a job's trajectories are, for this machine.

    Args:
        directory: Where the job's volume is mounted; None: the output is an object store.

    Raises:
        NotARun: The job has no output yet, or it is a volume that is not mounted.
    """
    if directory is not None:
        return directory
    try:
        found = job.job()
    except EndpointError as error:
        raise NotARun(str(error)) from error
    status, spec = found.get("status") or {}, found.get("spec") or {}
    uri = (status.get("output") or {}).get("uri") or (spec.get("output") or {}).get("uri")
    if not uri:
        raise NotARun(f"{job}: it has no output yet: the operator decides on it when it starts the job")
    if str(uri).startswith("pvc:"):
        raise NotARun(
            f"{job}: its output is the volume {uri}: mount the claim here, and open the job with directory= the path "
            "of the run in it"
        )
    return str(uri)


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((item for item in status.get("conditions") or () if item.get("type") == kind), {})
