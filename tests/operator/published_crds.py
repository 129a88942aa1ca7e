"""Published CRDs of others, kept small: parts that occur many times are kept once.

    python -m tests.operator.published_crds CRD.yaml VERSION SOURCE

writes `data/PLURAL.json` of that version of a CRD, as a release of KubeRay, Kueue or LeaderWorkerSet has it; SOURCE
says which one. All three are under the Apache License 2.0.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

DATA = Path(__file__).parent / "data"
_SHARED = "$shared"
# A reference is about as long.
_WORTH = 64


def crd(plural: str) -> dict[str, Any]:
    """The CRD as it was published, with one version only, and without conversion and descriptions."""
    kept = json.loads((DATA / f"{plural}.json").read_text())
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


def schema(plural: str) -> dict[str, Any]:
    """The JSON schema of a kind, as strict as an API server that is told so: no field but the known ones."""
    [version] = crd(plural)["spec"]["versions"]
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


def _without_descriptions(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key != "description" or not isinstance(item, str)}
        return {key: _without_descriptions(item) for key, item in kept.items()}
    return [_without_descriptions(item) for item in value] if isinstance(value, list) else value


def _small(found: dict[str, Any], version: str, source: str) -> dict[str, Any]:
    found["spec"]["versions"] = [item for item in found["spec"]["versions"] if item["name"] == version]
    found["spec"].pop("conversion", None)
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
        "from": source,
        "license": "Apache-2.0, Copyright its authors",
        "changes": f"version {version} only, without conversion and descriptions; equal parts are kept once, in parts, "
        f"and named by {_SHARED}",
        "crd": shared(found),
        "parts": dict(sorted(parts.items())),
    }


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m tests.operator.published_crds CRD.yaml VERSION SOURCE")
    published = _without_descriptions(YAML(typ="safe").load(Path(sys.argv[1]).read_text()))
    small = _small(published, *sys.argv[2:])
    name = published["spec"]["names"]["plural"]
    (DATA / f"{name}.json").write_text(json.dumps(small, indent=0, separators=(",", ":")) + "\n")
    assert json.dumps(crd(name), sort_keys=True) == json.dumps(published, sort_keys=True)
