"""KubeRay's published CRD of RayServices, kept small: parts that occur many times are kept once.

    python -m tests.operator.kuberay_schema ray.io_rayservices.yaml VERSION

writes `data/rayservices.json` of the file that a KubeRay release has in helm-chart/kuberay-operator/crds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

FILE = Path(__file__).parent / "data" / "rayservices.json"
_SHARED = "$shared"
# A reference is about as long.
_WORTH = 64


def crd() -> dict[str, Any]:
    """The CRD as it was published, with its version v1 only."""
    kept = json.loads(FILE.read_text())
    parts: dict[str, Any] = kept["parts"]

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            if _SHARED in value:
                return whole(parts[value[_SHARED]])
            return {key: whole(item) for key, item in value.items()}
        return [whole(item) for item in value] if isinstance(value, list) else value

    found = whole(kept["crd"])
    assert isinstance(found, dict)
    return found


def schema() -> dict[str, Any]:
    """The JSON schema of a RayService, as strict as an API server that is told so: no field but the known ones."""
    [version] = crd()["spec"]["versions"]
    found = _strict(version["schema"]["openAPIV3Schema"])
    # Of these an API server knows more than the CRD says.
    found["properties"]["metadata"] = {"type": "object"}
    assert isinstance(found, dict)
    return found


def _strict(node: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as JSON schema."""
    made = {key: value for key, value in node.items() if not key.startswith("x-kubernetes-") and key != "default"}
    if node.get("x-kubernetes-int-or-string"):
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        made.pop("type", None)
    if isinstance(node.get("items"), dict):
        made["items"] = _strict(node["items"])
    if "properties" in node:
        made["properties"] = {name: _strict(item) for name, item in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    elif isinstance(node.get("additionalProperties"), dict):
        made["additionalProperties"] = _strict(node["additionalProperties"])
    return made


def _small(found: dict[str, Any], version: str) -> dict[str, Any]:
    found["spec"]["versions"] = [item for item in found["spec"]["versions"] if item["name"] == "v1"]
    texts: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def count(value: Any) -> None:
        if isinstance(value, dict):
            text = json.dumps(value, sort_keys=True)
            if len(text) > _WORTH:
                name = hashlib.sha256(text.encode()).hexdigest()[:8]
                assert texts.setdefault(name, text) == text
                counts[name] += 1
                if counts[name] > 1:
                    return
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            count(item)

    count(found)
    parts: dict[str, Any] = {}

    def shared(value: Any, *, top: bool = False) -> Any:
        if isinstance(value, dict):
            text = json.dumps(value, sort_keys=True)
            name = hashlib.sha256(text.encode()).hexdigest()[:8]
            if not top and counts[name] > 1:
                if name not in parts:
                    parts[name] = None
                    parts[name] = shared(value, top=True)
                return {_SHARED: name}
            return {key: shared(item) for key, item in sorted(value.items())}
        return [shared(item) for item in value] if isinstance(value, list) else value

    return {
        "from": f"github.com/ray-project/kuberay {version}, helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml",
        "license": "Apache-2.0, Copyright the KubeRay authors",
        "changes": f"version v1 only; equal parts are kept once, in parts, and named by {_SHARED}",
        "crd": shared(found),
        "parts": dict(sorted(parts.items())),
    }


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tests.operator.kuberay_schema CRD.yaml VERSION")
    published = YAML(typ="safe").load(Path(sys.argv[1]).read_text())
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(_small(published, sys.argv[2]), indent=0, separators=(",", ":")) + "\n")
    again = crd()
    assert json.dumps(again, sort_keys=True) == json.dumps(published, sort_keys=True)
