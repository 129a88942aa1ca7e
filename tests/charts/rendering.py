"""The chart, rendered by Helm itself."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helm_python import Chart
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kuberoll"
RELEASE = "kuberoll"
NAMESPACE = "kuberoll-system"

Object = dict[str, Any]


def chart_of_version(version: str, directory: Path) -> Path:
    """A copy of the chart that says that it is of another version."""
    place = directory / "kuberoll"
    shutil.copytree(CHART, place)
    file = place / "Chart.yaml"
    lines = [f"version: {version}" if line.startswith("version:") else line for line in file.read_text().split("\n")]
    file.write_text("\n".join(lines))
    return place


@contextmanager
def loaded(path: Path = CHART) -> Iterator[Chart]:
    """The chart as Helm has read it."""
    chart = Chart.load(path)
    try:
        yield chart
    finally:
        chart.close()


def rendered(values: Mapping[str, Any] | None = None, path: Path = CHART, namespace: str = NAMESPACE) -> list[Object]:
    """The objects that Helm makes of these values, those of hooks among them."""
    return copy.deepcopy(_rendered(json.dumps(values or {}), path, namespace))


@functools.cache
def _rendered(values: str, path: Path, namespace: str) -> list[Object]:
    with loaded(path) as chart:
        files = chart.render(json.loads(values), name=RELEASE, namespace=namespace)
    return [item for name, text in sorted(files.items()) if name.endswith(".yaml") for item in _objects(text)]


@functools.cache
def _objects(text: str) -> list[Object]:
    """The objects of a file: the CRD, half a second's work, is the same with most values."""
    return [item for item in YAML(typ="safe").load_all(text) if item is not None]


def notes(values: Mapping[str, Any] | None = None) -> str:
    """What Helm prints after an installation."""
    with loaded() as chart:
        return chart.render(dict(values or {}), name=RELEASE, namespace=NAMESPACE)["kuberoll/templates/NOTES.txt"]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    """Those of one kind."""
    return [item for item in objects if item["kind"] == kind]


def one(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The only one of its kind, or of its kind and name."""
    [found] = [item for item in of_kind(objects, kind) if name in (None, item["metadata"]["name"])]
    return found
