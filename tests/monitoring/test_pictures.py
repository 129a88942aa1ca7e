"""The pictures of the dashboards: they can be drawn of nothing, of little and of values that are none."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.monitoring.support import DASHBOARDS, ROOT

pytest.importorskip("matplotlib")
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "dashboard_pictures.py"))


class Canned:
    """The same answer to every query."""

    def __init__(self, result: list[dict[str, Any]]) -> None:
        self.span = SCRIPT["Span"](start=1000.0, end=1060.0, interval="10s")
        self._result = result

    def series(self, target: dict[str, Any]) -> list[Any]:
        import numpy as np

        legend = "0.5" if target["legendFormat"] == "{{le}}" else target["legendFormat"]
        return [SCRIPT["Series"](legend, np.array([1000.0, 1030.0]), np.array(item["values"])) for item in self._result]


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1.0, float("nan")], [-2.0, 1e7]])
@pytest.mark.parametrize("path", sorted(DASHBOARDS.glob("*.json")), ids=lambda path: path.stem)
def test_every_dashboard_can_be_drawn(path: Path, values: list[float], tmp_path: Path) -> None:
    source = Canned([{"values": values}] if values else [])
    SCRIPT["Picture"](json.loads(path.read_text()), source).draw(tmp_path / "it.png")
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.934, "percentunit", "93.4 %"),
        (0.0, "s", "0 s"),
        (0.0042, "s", "4.2 ms"),
        (75, "s", "1.25 min"),
        (7200, "s", "2 h"),
        (250, "ms", "250 ms"),
        (12345, "short", "12.3 K"),
        (2e6, "short", "2 M"),
        (float("nan"), "short", "–"),
    ],
)
def test_amounts(value: float, unit: str, words: str) -> None:
    assert SCRIPT["amount"](value, unit) == words
