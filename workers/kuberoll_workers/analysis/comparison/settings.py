"""Settings in which two runs differ, and what these mean for their comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from kuberoll_workers.data.text import one_line
from kuberoll_workers.output.run_directory import RunManifest

_LONGEST = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of two runs.

    Attributes:
        different: Name and both values, as text, of each setting that differs; None where a run has none.
        equal: Number of equal settings.
        same_tasks: True if both runs are known to have the same dataset, so that equal task indexes are equal tasks.
        notes: Sentences about what limits the comparison.
    """

    different: list[tuple[str, str | None, str | None]]
    equal: int
    same_tasks: bool
    notes: list[str]


def compare_settings(first: RunManifest | None, second: RunManifest | None) -> Settings:
    """Compare the manifests of two runs A and B; None for a run without one."""
    if first is None or second is None:
        lacking = "A and B have" if first is second else f"{'A' if first is None else 'B'} has"
        note = (
            f"{lacking} no manifest.json, so nothing says which settings differ, or whether the tasks are the "
            "same: tasks are not paired"
        )
        return Settings(different=[], equal=0, same_tasks=False, notes=[note])
    one, two = dict(_settings(first)), dict(_settings(second))
    names = [*one, *(name for name in two if name not in one)]
    different = [(name, _text(one, name), _text(two, name)) for name in names if one.get(name) != two.get(name)]
    same_tasks = first.inputs.get("digest") is not None and first.inputs.get("digest") == second.inputs.get("digest")
    return Settings(
        different=different,
        equal=len(names) - len(different),
        same_tasks=same_tasks,
        notes=list(_notes(first, second, [name for name, _, _ in different], same_tasks=same_tasks)),
    )


def _settings(manifest: RunManifest) -> Iterator[tuple[str, Any]]:
    yield from ((name, value) for name, value in manifest.identity.items() if value is not None)
    yield from ((f"dataset: {name}", value) for name, value in manifest.inputs.items())
    yield from ((f"code of environment {name}", digest) for name, digest in manifest.code.items())
    yield from ((f"version of {name}", version) for name, version in manifest.versions.items())


def _text(settings: Mapping[str, Any], name: str) -> str | None:
    if name not in settings:
        return None
    value = settings[name]
    return one_line(value if isinstance(value, str) else orjson.dumps(value).decode(), _LONGEST)


def _notes(first: RunManifest, second: RunManifest, different: list[str], *, same_tasks: bool) -> Iterator[str]:
    if not same_tasks:
        rows = [manifest.inputs.get("rows", "an unknown number of") for manifest in (first, second)]
        yield (
            f"the datasets differ ({rows[0]} rows in A, {rows[1]} in B): tasks are not paired, and differences may "
            "come from the rows"
        )
    changed = [name for name in different if name.startswith(("environments[", "code of environment "))]
    if changed:
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        yield f"the environments differ ({shown}): their rewards may not mean the same"
    for name, manifest in (("A", first), ("B", second)):
        if manifest.identity.get("generation.engine") == "Simulated":
            yield f"{name} is a run of the Simulated engine: no model wrote its responses"
        if manifest.forced:
            yield f"{name} was continued with --force and mixes parts with different settings"
