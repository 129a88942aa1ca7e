"""Draws the chart's dashboards as pictures, with what a Prometheus has: no Grafana needed.

    python scripts/dashboard_pictures.py http://127.0.0.1:9090 [--last 10m | --from UNIX --to UNIX] [rollouts fleet ...]

Panels, queries, units, limits and places are those of the dashboards' JSON; the pictures go to docs/images.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

ROOT: Final = Path(__file__).resolve().parents[1]
DASHBOARDS: Final = ROOT / "charts" / "kuberoll" / "files" / "dashboards"
OUTPUT: Final = ROOT / "docs" / "images"

# Pixels.
WIDTH: Final = 1680
COLUMN: Final = WIDTH / 24
UNIT: Final = 34
ROW: Final = 36
HEAD: Final = 62
GAP: Final = 8
LINE: Final = 20
DPI: Final = 100
CHARACTER: Final = 6.9
BOLD: Final = 8.4

PAGE, CARD, EDGE, TEXT, DIM, GRID = "#111217", "#181b1f", "#2a2d33", "#d5d5df", "#8e8e9c", "#26292f"
COLORS: Final = (
    "#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d", "#ffb357", "#ca95e5",
    "#37872d", "#1f60c4",
)  # fmt: skip
LIMITS: Final = {"green": "#73bf69", "yellow": "#f2cc0c", "red": "#f2495c"}
HEAT: Final = LinearSegmentedColormap.from_list("heat", ["#181b1f", "#4a1d5a", "#b5384c", "#f28e2b", "#fdf5a6"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What is drawn.

    Attributes:
        start, end: Unix seconds.
        interval: The range of rates.
        job: A regular expression.
    """

    start: float
    end: float
    interval: str
    job: str = ".*"

    @property
    def step(self) -> float:
        """Seconds between two points."""
        return max(1.0, (self.end - self.start) / 240)

    def fill(self, expression: str) -> str:
        """A query without variables: all namespaces and environments, in these ranges."""
        for name, value in (("$namespace", ".*"), ("$job", self.job), ("$environment", ".*")):
            expression = expression.replace(name, value)
        return expression.replace("$__rate_interval", self.interval).replace(
            "$__range", f"{max(1, round(self.end - self.start))}s"
        )


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its legend, Unix seconds and values."""

    legend: str
    times: np.ndarray[Any, np.dtype[np.float64]]
    values: np.ndarray[Any, np.dtype[np.float64]]


class Source:
    """A Prometheus."""

    def __init__(self, url: str, span: Span) -> None:
        self._url = url.rstrip("/")
        self.span = span

    def series(self, target: Mapping[str, Any]) -> list[Series]:
        """What a panel's query has to show, newest last."""
        span, expression = self.span, self.span.fill(target["expr"])
        if target.get("instant"):
            data = self._get("query", query=expression, time=str(span.end))
            found = [(item["metric"], [item["value"]]) for item in data["result"]]
        else:
            data = self._get(
                "query_range", query=expression, start=str(span.start), end=str(span.end), step=str(span.step)
            )
            found = [(item["metric"], item["values"]) for item in data["result"]]
        made = []
        for labels, points in found:
            times, values = np.array([[float(moment), float(value)] for moment, value in points]).T
            made.append(Series(_legend(target["legendFormat"], labels), times, values))
        return made

    def _get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}", data=query.encode(), timeout=60) as answer:
            return json.load(answer)["data"]


def _legend(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template).strip().strip("/")


def amount(value: float, unit: str, decimals: int | None = None) -> str:
    """A value as a person reads it.

    >>> amount(0.934, "percentunit"), amount(0.0042, "s"), amount(75, "s"), amount(12345, "short")
    ('93.4 %', '4.2 ms', '1.25 min', '12.3 K')
    """
    if not math.isfinite(value):
        return "–"
    match unit:
        case "percentunit":
            return f"{_digits(100 * value, decimals)} %"
        case "ms":
            return amount(value / 1000, "s", decimals)
        case "s":
            for limit, factor, name in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (60, 1, "s"), (3600, 1 / 60, "min")):
                if abs(value) < limit:
                    return f"{_digits(value * factor, decimals)} {name}" if value else "0 s"
            return f"{_digits(value / 3600, decimals)} h"
        case _:
            for limit, name in ((1e9, " G"), (1e6, " M"), (1e4, " K")):
                if abs(value) >= limit:
                    return f"{_digits(value / (1e3 if name == ' K' else limit), decimals)}{name}"
            return _digits(value, decimals)


def _digits(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


class Picture:
    """A dashboard's page."""

    def __init__(self, dashboard: Mapping[str, Any], source: Source) -> None:
        self._dashboard = dashboard
        self._source = source
        self._placed = list(_places(dashboard["panels"]))
        self._height = max(top + height for _, _, top, _, height in self._placed) + GAP
        self._figure = Figure(figsize=(WIDTH / DPI, self._height / DPI), dpi=DPI, facecolor=PAGE)

    def draw(self, path: Path) -> None:
        """Make the file."""
        span = self._source.span
        self._words(16, 24, self._dashboard["title"], size=15, weight="bold")
        self._words(16, 46, self._dashboard["description"], size=9.5, color=DIM)
        begin, end = (datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S") for moment in (span.start, span.end))
        self._words(WIDTH - 16, 24, f"{begin} to {end} UTC", size=9.5, color=DIM, align="right")
        for panel, left, top, width, height in self._placed:
            if panel["type"] == "row":
                self._words(left + 8, top + ROW / 2 + 4, f"⌄  {panel['title']}", size=11, weight="bold")
            else:
                self._panel(panel, left, top, width, height)
        self._figure.savefig(path, dpi=DPI, facecolor=PAGE, metadata={"Software": None})

    def _panel(self, panel: Mapping[str, Any], left: float, top: float, width: float, height: float) -> None:
        self._figure.add_artist(
            FancyBboxPatch(
                (left / WIDTH, 1 - (top + height) / self._height),
                width / WIDTH,
                height / self._height,
                boxstyle="round,pad=0,rounding_size=0.002",
                transform=self._figure.transFigure,
                facecolor=CARD,
                edgecolor=EDGE,
                linewidth=0.8,
                zorder=-1,
            )
        )
        self._words(left + 12, top + 18, _cut(panel["title"], width - 24), size=10, weight="bold")
        found = [series for target in panel["targets"] for series in self._source.series(target)]
        found = [series for series in found if np.isfinite(series.values).any()]
        inner = (left + 12, top + 34, width - 24, height - 44)
        if not found:
            self._words(left + width / 2, top + height / 2 + 8, "nothing in this range", color=DIM, align="center")
            return
        draw = {
            "stat": self._number,
            "bargauge": self._bars,
            "heatmap": self._heat,
            "timeseries": self._lines,
            "table": self._table,
        }[panel["type"]]
        draw(panel, found, *inner)

    def _number(
        self, panel: Mapping[str, Any], found: Sequence[Series], x: float, y: float, width: float, height: float
    ) -> None:
        value, look = found[0].values[-1], _Look(panel)
        self._words(
            x + width / 2, y + height / 2 + 4, look.say(value), size=25, color=look.color(value), align="center",
            weight="bold",
        )  # fmt: skip

    def _bars(
        self, panel: Mapping[str, Any], found: Sequence[Series], x: float, y: float, width: float, height: float
    ) -> None:
        look = _Look(panel)
        found = sorted(found, key=lambda series: -np.nan_to_num(series.values[-1]))
        axes = self._axes(x + 130, y, width - 200, height)
        axes.set_axis_off()
        values = [float(np.nan_to_num(series.values[-1])) for series in found]
        axes.barh(range(len(found)), [max(values) or 1] * len(found), height=0.55, color=GRID)
        axes.barh(range(len(found)), values, height=0.55, color=[look.color(value) for value in values])
        axes.set(ylim=(max(len(found), 4) - 0.4, -0.6), xlim=(0, max(values) or 1))
        for number, (series, value) in enumerate(zip(found, values, strict=True)):
            axes.annotate(
                series.legend, (0, number), (-8, 0), textcoords="offset points", ha="right", va="center", color=TEXT,
                fontsize=9,
            )  # fmt: skip
            axes.annotate(
                look.say(value), (max(values) or 1, number), (8, 0), textcoords="offset points", va="center",
                color=look.color(value), fontsize=9.5, weight="bold",
            )  # fmt: skip

    def _table(
        self, panel: Mapping[str, Any], found: Sequence[Series], x: float, y: float, width: float, height: float
    ) -> None:
        look = _Look(panel)
        # A table is of the last moment.
        rows = [(series.legend, series.values[-1]) for series in found if np.isfinite(series.values[-1])]
        for number, (legend, value) in enumerate(rows[: max(1, int(height // LINE))]):
            middle = y + LINE * number + LINE * 0.7
            self._words(x, middle, _cut(legend, width - 120), size=9.5)
            self._words(x + width, middle, look.say(value), size=9.5, color=DIM, align="right")
        if not rows:
            self._words(x + width / 2, y + height / 2, "nothing at the end of this range", color=DIM, align="center")

    def _lines(
        self, panel: Mapping[str, Any], found: Sequence[Series], x: float, y: float, width: float, height: float
    ) -> None:
        look = _Look(panel)
        axes = self._axes(x + 50, y, width - 54, height - 40)
        self._time(axes)
        found = sorted(found, key=lambda series: _natural(series.legend)) if len(panel["targets"]) == 1 else found
        if look.stacked:
            grid = np.unique(np.concatenate([series.times for series in found]))
            layers = [_at(series, grid) for series in found]
            axes.stackplot(grid, layers, colors=COLORS, alpha=0.45, linewidth=0)
            for number, edge in enumerate(np.cumsum(layers, axis=0)):
                axes.plot(grid, edge, color=COLORS[number % len(COLORS)], linewidth=1)
            top = float(np.sum(layers, axis=0).max())
        else:
            for number, series in enumerate(found):
                color = COLORS[number % len(COLORS)]
                axes.plot(series.times, series.values, color=color, linewidth=1.4)
                if len(found) < 3:
                    axes.fill_between(series.times, series.values, color=color, alpha=0.1, linewidth=0)
            top = max(float(np.nanmax(series.values[np.isfinite(series.values)])) for series in found)
        top = (look.bound or top * 1.08) or 1.0
        lowest = 0.0 if look.stacked else min(float(np.nanmin(series.values)) for series in found)
        axes.set_ylim(min(0.0, lowest * 1.08), top)
        for limit, color in look.limits:
            if limit <= top:
                axes.axhline(limit, color=color, linewidth=1, linestyle=(0, (4, 3)))
        axes.yaxis.set_major_locator(mpl.ticker.MaxNLocator(4, integer=top >= 3 and look.unit == "short"))
        axes.yaxis.set_major_formatter(lambda value, _: look.say(value, axis=True))
        self._legends(found, x, y + height - 6, width)

    def _heat(
        self, _: Mapping[str, Any], found: Sequence[Series], x: float, y: float, width: float, height: float
    ) -> None:
        found = sorted(found, key=lambda series: float(series.legend))
        grid = np.unique(np.concatenate([series.times for series in found]))
        below = np.diff(np.vstack([np.zeros_like(grid), *(_at(series, grid) for series in found)]), axis=0)
        shown = [number for number in range(len(found)) if below[number].max() > 0.05] or [0]
        first, last = max(0, shown[0] - 1), min(len(found), shown[-1] + 2)
        axes = self._axes(x + 50, y, width - 54, height - 22)
        self._time(axes)
        axes.grid(visible=False)
        half = self._source.span.step / 2
        edges = np.append(grid - half, grid[-1] + half)
        axes.pcolormesh(edges, np.arange(last - first + 1), np.maximum(below[first:last], 0), cmap=HEAT)
        axes.set_yticks(
            np.arange(last - first) + 0.5, [f"≤ {found[n].legend}".replace("+Inf", "∞") for n in range(first, last)]
        )

    def _axes(self, left: float, top: float, width: float, height: float) -> Axes:
        axes = self._figure.add_axes(
            (left / WIDTH, 1 - (top + height) / self._height, width / WIDTH, height / self._height)
        )
        axes.set_facecolor(CARD)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(length=0, labelsize=8.5, labelcolor=DIM, pad=4)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        return axes

    def _time(self, axes: Axes) -> None:
        span = self._source.span
        axes.set_xlim(span.start, span.end)
        length = span.end - span.start
        every = next(
            seconds for seconds in (15, 30, 60, 120, 300, 600, 1800, 3600, 21600, 86400) if length / seconds < 7
        )
        axes.set_xticks(np.arange(math.ceil(span.start / every) * every, span.end, every))
        shape = "%H:%M:%S" if every < 60 else "%H:%M"
        axes.xaxis.set_major_formatter(lambda value, _: datetime.fromtimestamp(value, UTC).strftime(shape))

    def _legends(self, found: Sequence[Series], x: float, y: float, width: float) -> None:
        names = list(enumerate(series.legend for series in found))
        if sum(36 + CHARACTER * len(name) for _, name in names) > width:
            # Where not all have room: those that there is something to see of.
            names = [(number, name) for number, name in names if np.nan_to_num(found[number].values).any()]
        position = x
        for place, (number, name) in enumerate(names):
            rest = len(names) - place
            needed = 22 + CHARACTER * len(name) + 14
            if position + needed > x + width - (45 if rest > 1 else 0):
                self._words(position, y, f"… +{rest}", size=9, color=DIM)
                return
            middle = 1 - (y - 4) / self._height
            self._figure.add_artist(
                Rectangle(
                    (position / WIDTH, middle),
                    14 / WIDTH,
                    3 / self._height,
                    transform=self._figure.transFigure,
                    color=COLORS[number % len(COLORS)],
                )
            )
            self._words(position + 20, y, name, size=9)
            position += needed

    def _words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 9.5,
        color: str = TEXT,
        align: str = "left",
        weight: str = "normal",
    ) -> None:
        """Words whose middle is at so many pixels from the left and the top."""
        self._figure.text(
            x / WIDTH, 1 - y / self._height, text, fontsize=size, color=color, ha=align, va="center", weight=weight
        )


class _Look:
    """How a panel shows its values."""

    def __init__(self, panel: Mapping[str, Any]) -> None:
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        custom = defaults.get("custom", {})
        self.unit = defaults.get("unit", "short")
        self.bound: float | None = defaults.get("max")
        self.stacked = custom.get("stacking", {}).get("mode") == "normal"
        self._decimals = defaults.get("decimals")
        steps = defaults.get("thresholds", {}).get("steps", [])
        self.limits = [(step["value"], LIMITS[step["color"]]) for step in steps if step.get("value") is not None]

    def say(self, value: float, *, axis: bool = False) -> str:
        """A value in words."""
        return amount(value, self.unit, None if axis else self._decimals)

    def color(self, value: float) -> str:
        """A value's color."""
        passed = [color for limit, color in self.limits if value >= limit]
        return passed[-1] if passed else LIMITS["green"]


def _places(panels: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], float, float, float, float]]:
    """Panels with left, top, width and height in pixels; rows are lower than Grafana's units."""
    listed = sorted(panels, key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))
    rows = 0
    for panel in listed:
        place = panel["gridPos"]
        top = HEAD + (place["y"] - rows) * UNIT + rows * ROW
        if panel["type"] == "row":
            rows += 1
            yield panel, GAP, top, WIDTH - 2 * GAP, ROW
        else:
            height = place["h"] * UNIT - GAP
            yield panel, place["x"] * COLUMN + GAP / 2, top, place["w"] * COLUMN - GAP, height


def _at(series: Series, grid: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.zeros_like(grid)
    values[np.searchsorted(grid, series.times)] = np.nan_to_num(series.values)
    return values


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]


def _cut(text: str, width: float) -> str:
    room = int(width / BOLD)
    return text if len(text) <= room else text[: room - 1] + "…"


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text}: want 90s, 10m or 2h")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def main() -> None:
    """The command's entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a Prometheus")
    parser.add_argument("dashboards", nargs="*", help="names of the JSON files; all by default")
    parser.add_argument("--last", type=_seconds, default=_seconds("10m"))
    parser.add_argument("--from", dest="start", type=float)
    parser.add_argument("--to", dest="end", type=float, default=time.time())
    parser.add_argument("--interval", default="1m", help="range of rates; four scrapes and more  [1m]")
    parser.add_argument("--job", default=".*", help="on the dashboards of one job: which")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    start = given.start if given.start is not None else given.end - given.last
    source = Source(given.url, Span(start=start, end=given.end, interval=given.interval, job=given.job))
    pyplot.rcParams["font.family"] = "DejaVu Sans"
    given.output.mkdir(parents=True, exist_ok=True)
    for path in sorted(DASHBOARDS.glob("*.json")):
        if not given.dashboards or path.stem in given.dashboards:
            picture = given.output / f"dashboard-{path.stem}.png"
            Picture(json.loads(path.read_text()), source).draw(picture)
            print(picture.relative_to(ROOT) if picture.is_relative_to(ROOT) else picture)


if __name__ == "__main__":
    main()
