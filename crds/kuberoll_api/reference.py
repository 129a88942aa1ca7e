"""The reference page of a RolloutJob's fields, docs/rolloutjob.md, made from the CRD's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kuberoll_api.crd import schema
from kuberoll_api.rules import ONLY_SUSPENDED, WORKERS_AT_ANY_TIME
from kuberoll_api.schema import in_words

Schema = dict[str, Any]

_INTRODUCTION = """\
<!-- Made by `make crd` from kuberoll_api; change the model there. -->
# The RolloutJob

`kuberoll.io/v1alpha1`, `kubectl get rlj`. The same manifest runs on a laptop (`kuberoll run`) and in a cluster
(`kubectl apply`). `kuberoll validate FILE` finds every mistake with its line; an API server refuses the same ones, and
`kubectl explain rlj.spec.generation` shows what is written here.

```
kubectl apply -f job.yaml
kubectl get rlj -w                                  # -o wide: model, backend, endpoint, reason
kubectl wait --for=condition=Complete rlj/my-job --timeout=2h
kubectl scale rlj/my-job --replicas=8               # spec.workers.replicas
kubectl patch rlj my-job --type=merge -p '{{"spec":{{"suspend":true}}}}'
```

## What may change

| field | may change |
|---|---|
| `suspend`, `activeDeadlineSeconds`, `startupDeadlineSeconds`, `ttlSecondsAfterFinished`, {workers} | at any time |
| {suspended}, the rest of `workers` | while `suspend` is true: suspend, then change and resume, in one or two steps |
| `managedBy` | never |

A suspended job keeps every finished trajectory, and resumed it goes on where it was. It stays the same run: when the
dataset, the model, `engineArgs`, `sampling`, the environments and their `config`, or `maxTurns` were changed meanwhile,
its workers refuse to mix the results; make a new job for those. Resources, images, time limits, retries and concurrency
are what suspending is for. `workers.shards` counts when the workers first start, and not again.

## What only a cluster checks

Of an object that is there, an API server refuses changes to the fields above. Everything else that it refuses,
`kuberoll validate` refuses too, and names the line.
"""


def page() -> str:
    """The whole page, in Markdown."""
    root = schema()["properties"]
    parts = [
        _INTRODUCTION.format(
            workers=", ".join(["`weights`", *(f"`workers.{name}`" for name in WORKERS_AT_ANY_TIME)]),
            suspended=", ".join(f"`{name}`" for name in ONLY_SUSPENDED),
        )
    ]
    for name, title in (("spec", "Fields"), ("status", "Status")):
        parts.append(f"## {title}\n\n{root[name]['description']}\n")
        parts += _sections(name, root[name], {})
    return "\n".join(parts)


def _sections(path: str, given: Schema, seen: dict[str, str]) -> Iterator[str]:
    """The table of an object, then those of the objects in it; one that was shown before is referred to."""
    seen[_identity(given)] = path
    rows, inner = [], []
    for name, field in given["properties"].items():
        place, within = f"{path}.{name}", field
        if field.get("type") == "array":
            place, within = f"{place}[]", field["items"]
        shown = f"`{name}`"
        if "properties" in within:
            where = seen.setdefault(_identity(within), place)
            shown = f"[`{name}`](#{_anchor(where)})"
            inner += [(place, within)] if where == place else []
        default = "required" if name in given.get("required", ()) else _default(field)
        rows.append(f"| {shown} | {_cell(_kind(field))} | {default} | {_cell(field['description'])} |\n")
    yield f"### {path}\n\n| field | | default | |\n|---|---|---|---|\n{''.join(rows)}"
    for place, within in inner:
        yield from _sections(place, within, seen)


def _identity(given: Schema) -> str:
    return json.dumps(given["properties"], sort_keys=True)


def _kind(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return in_words([{**field, "type": "string"}, {"type": "integer"}])
    words = dict(field)
    for bound in ("Minimum", "Maximum"):
        if words.get(f"exclusive{bound}") is True:
            words[f"exclusive{bound}"] = words.pop(bound.lower())
    text = in_words([words])
    free = field.get("additionalProperties", {})
    return f"{text}; each is {_kind(free)}" if free.get("type") or "anyOf" in free else text


def _default(field: Schema) -> str:
    default = field.get("default")
    return "" if default is None or isinstance(default, dict) else f"`{json.dumps(default)}`".replace('"', "")


def _anchor(path: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "", path.lower())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
