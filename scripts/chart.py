"""Makes of the chart's values.yaml, with its comments, the table in its README and values.schema.json.

    python -m scripts.chart [--check]

Also copies the CRD and the alerts into the chart. With --check nothing is written, and the exit code is 1 where a file
is stale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from scripts.generated import ROOT, write_or_check

CHART: Final = ROOT / "charts" / "kuberoll"
CRD: Final = "rolloutjobs.kuberoll.io.yaml"
ALERTS: Final = ROOT / "workers" / "kuberoll_workers" / "monitor" / "alerts.yaml"

_BEGIN, _END = "<!-- values: made by scripts/chart.py -->", "<!-- end of values -->"
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))*$"}
_POLICIES = ["Always", "IfNotPresent", "Never"]
_LOG_LEVELS = ["debug", "info", "warning", "error"]
_NAMESPACE = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}

# What the defaults do not tell.
_STRICTER: Final[dict[str, dict[str, Any]]] = {
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": _POLICIES},
    "jobs.imagePullPolicy": {"enum": ["", *_POLICIES]},
    "jobs.fsGroup": {"type": ["integer", "null"], "minimum": 1},
    "jobs.runAsGroup": {"type": ["integer", "null"], "minimum": 1},
    "jobs.runAsUser": {"type": ["integer", "null"], "minimum": 1},
    "jobs.egressPorts": {"type": "array", "items": _PORT},
    "jobs.egressExcept": {"type": "array", "items": {"type": "string", "pattern": "^[0-9a-fA-F:.]+/[0-9]+$"}},
    "watch.namespaces": {"type": "array", "items": _NAMESPACE, "uniqueItems": True},
    "operator.replicas": {"type": "integer", "minimum": 0, "maximum": 16},
    "operator.concurrency": {"type": "integer", "minimum": 1, "maximum": 256},
    "jobs.idleEnginesSeconds": {"type": "number", "exclusiveMinimum": 0},
    "operator.progressSeconds": {"type": "number", "exclusiveMinimum": 0},
    "operator.resyncSeconds": {"type": "number", "exclusiveMinimum": 0},
    "operator.logLevel": {"enum": _LOG_LEVELS},
    "sandboxes.logLevel": {"enum": _LOG_LEVELS},
    "sandboxes.starts": {"type": "integer", "minimum": 1},
    "sandboxes.startsPerJob": {"type": "integer", "minimum": 1},
    "operator.leaderElection.leaseSeconds": {"type": "number", "minimum": 3},
    "operator.terminationGracePeriodSeconds": {"type": "integer", "minimum": 25},
    "operator.hostUsers": {"type": ["boolean", "null"]},
    "operator.extraArgs": {"type": "array", "items": {"type": "string"}},
    "podDisruptionBudget.maxUnavailable": {"type": ["integer", "string"]},
    "service.port": _PORT,
    "networkPolicy.apiServerPorts": {"type": "array", "items": _PORT, "minItems": 1},
    "monitoring.operator.serviceMonitor.interval": _DURATION,
    "monitoring.workers.podMonitor.interval": _DURATION,
    "monitoring.generation.podMonitor.interval": _DURATION,
}
# Objects of Kubernetes' own shape, which the API server checks.
_FREE: Final = frozenset(
    {"operator.resources", "operator.podSecurityContext", "operator.securityContext", "sandboxes.resources"}
)


def values_of(text: str) -> Any:
    """values.yaml with its comments."""
    yaml = YAML(typ="rt")
    return yaml.load(text)


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings, each with its default, in the file's order."""
    for key, value in values.items():
        place = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value and place not in _FREE:
            yield from leaves(value, place)
        else:
            yield place, value


def words(text: str) -> dict[str, str]:
    """What the comments say of each setting.

    Raises:
        ValueError: A setting has no comment.
    """
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    said = ""
    for line in text.splitlines():
        if match := re.match(r"\s*# -- (.*)", line):
            said = match[1]
        elif match := re.match(r"( *)([A-Za-z]+):", line):
            indent = len(match[1])
            parents = [item for item in parents if item[0] < indent] + [(indent, match[2])]
            found[".".join(name for _, name in parents)] = said
            said = ""
    for path, _ in leaves(values_of(text)):
        if not found.get(path):
            raise ValueError(f"values.yaml: {path} has no comment that begins with `# --`")
    return found


def schema(text: str) -> dict[str, Any]:
    """The JSON schema of the values: what is not there is a mistake."""
    comments = words(text)
    made = _object(values_of(text), "", comments)
    made["properties"] |= {"global": {"type": "object"}}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of KubeRoll's chart", **made}


def _object(values: Any, path: str, comments: dict[str, str]) -> dict[str, Any]:
    properties = {}
    for key, value in values.items():
        place = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value and place not in _FREE:
            properties[str(key)] = _object(value, place, comments)
        else:
            kind = _STRICTER.get(place) or {"type": _type(value)}
            properties[str(key)] = {"description": comments[place], **kind}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _type(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    raise ValueError(f"a default of {value!r} does not tell its type; name it in _STRICTER")


def table(text: str) -> str:
    """The settings as a Markdown table."""
    comments = words(text)
    rows = ["| value | default | |", "|---|---|---|"]
    for path, value in leaves(values_of(text)):
        shown = json.dumps(value, ensure_ascii=False)
        rows.append(f"| `{path}` | `{shown}` | {comments[path]} |")
    return "\n".join(rows)


def files() -> dict[Path, str]:
    """What is made, by path."""
    text = (CHART / "values.yaml").read_text()
    readme = (CHART / "README.md").read_text()
    head, rest = readme.split(_BEGIN)
    _, tail = rest.split(_END)
    return {
        CHART / "README.md": f"{head}{_BEGIN}\n{table(text)}\n{_END}{tail}",
        CHART / "values.schema.json": json.dumps(schema(text), indent=2) + "\n",
        CHART / "files" / "crds" / CRD: (ROOT / "crds" / CRD).read_text(),
        CHART / "files" / ALERTS.name: ALERTS.read_text(),
    }


def main() -> None:
    """The command's entry point."""
    write_or_check(files())


if __name__ == "__main__":
    main()
