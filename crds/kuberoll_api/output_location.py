"""Location of a job's output in a cluster."""

from __future__ import annotations

import posixpath
import re
from typing import Final, NamedTuple

OUTPUT_DIRECTORY: Final = "/var/lib/kuberoll-output"

_CLAIM = re.compile(r"pvc://(?P<claim>[a-z0-9]([-a-z0-9.]*[a-z0-9])?)(?P<path>/.*)?")
_REMEDY: Final = "name an object store (s3://bucket/run) or a volume of this namespace (pvc://CLAIM/path)"


class OutputLocation(NamedTuple):
    """Location that pods write to.

    Attributes:
        location: Directory in the pod, or URI.
        claim: PersistentVolumeClaim that is mounted for it; None for an object store.
    """

    location: str
    claim: str | None


class InvalidOutput(ValueError):
    """An output that pods cannot write to; the message names the field and the remedy."""


def default_output(root: str, namespace: str, name: str) -> str:
    """Output of a job that names none: ROOT/NAMESPACE/NAME, as `kuberoll run` writes to runs/NAME.

    Args:
        root: The operator's setting for the cluster, e.g. s3://bucket/rollouts or pvc://CLAIM.
    """
    return f"{root.rstrip('/')}/{namespace}/{name}"


def output_of(uri: str | None) -> OutputLocation:
    """The output of `spec.output.uri`, as pods see it.

    Raises:
        InvalidOutput: It is a path, or names no claim.
    """
    if not uri:
        raise InvalidOutput(
            f"spec.output.uri: missing, and this cluster has no default; {_REMEDY}, or give the operator a default for "
            "all jobs (the chart's jobs.defaultOutput, KUBEROLL_DEFAULT_OUTPUT)"
        )
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme in {"file", "local", "memory"}:
        raise InvalidOutput(f'spec.output.uri: found "{uri}", which is lost with the pod; {_REMEDY}')
    if scheme != "pvc":
        return OutputLocation(uri, None)
    found = _CLAIM.fullmatch(uri)
    path = posixpath.normpath((found["path"] or "").strip("/") or ".") if found else ".."
    if found is None or path.split("/")[0] == "..":
        raise InvalidOutput(f'spec.output.uri: found "{uri}"; write pvc://CLAIM or pvc://CLAIM/path')
    return OutputLocation(posixpath.normpath(posixpath.join(OUTPUT_DIRECTORY, path)), found["claim"])
