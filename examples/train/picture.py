"""The picture of a training: rewards, lag and waste by step, as SVG.

    python examples/train/picture.py runs/train

draws it again from the `steps.jsonl` of a training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from steps import Step, read, waste

WIDTH, TOP, LEFT, RIGHT = 760, 56, 52, 20
REWARD_HEIGHT, LAG_HEIGHT, WASTE_HEIGHT, GAP = 220, 80, 60, 44
AVERAGED = 8
"""Steps of the running mean."""
INK, PALE, GRID = "#1f2937", "#6b7280", "#e5e7eb"
REWARD, REWARD_PALE, HELD_OUT, LAG, WASTE = "#2563eb", "#bfdbfe", "#dc2626", "#0d9488", "#f59e0b"

Point = tuple[float, float]


def picture(steps: Sequence[Step]) -> str:
    """An SVG of at least one step after the first."""
    trained = [step for step in steps if step.step]
    last = max(1, *(step.step for step in trained))
    held_out = [(step.step, step.held_out) for step in steps if step.held_out is not None]
    lag_top = TOP + REWARD_HEIGHT + GAP
    waste_top = lag_top + LAG_HEIGHT + GAP
    bottom = waste_top + WASTE_HEIGHT
    height = bottom + 44
    wasted = [waste(trained[: number + 1]) for number in range(len(trained))]
    most_lag = max(2, *(step.most_lag for step in trained))
    most_waste = next(share for share in (0.1, 0.2, 0.5, 1.0) if share >= max(wasted))

    def x(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def reward_y(value: float) -> float:
        return TOP + (1 - value) * REWARD_HEIGHT

    def lag_y(value: float) -> float:
        return lag_top + (1 - value / most_lag) * LAG_HEIGHT

    def waste_y(value: float) -> float:
        return waste_top + (1 - value / most_waste) * WASTE_HEIGHT

    marks = [(x(step), reward_y(reward)) for step, reward in held_out]
    parts = [
        _text(LEFT - 36, 24, "A policy learns 2×3 sliding puzzles", size=16, weight="bold"),
        *_legend([(REWARD, "mean reward of a batch, and over 8 steps"), (HELD_OUT, "held-out puzzles")], TOP - 12),
        *(_grid(reward_y(value), f"{value:.1f}") for value in (0, 0.2, 0.4, 0.6, 0.8, 1)),
        *(_dot((x(step.step), reward_y(step.reward)), 2.5, REWARD_PALE) for step in trained),
        _line([(x(step.step), reward_y(value)) for step, value in _running_mean(trained)], REWARD, 2.5),
        _line(marks, HELD_OUT, 1, dashes="3 3"),
        *(_dot(mark, 5, HELD_OUT) for mark in marks),
        *(_mark(point, value) for point, (_, value) in zip(marks, held_out, strict=True)),
        *_legend([(LAG, "lag: versions from the oldest token to the newest weights, mean of a batch")], lag_top - 12),
        *(_grid(lag_y(value), str(value)) for value in range(0, most_lag + 1, 1 + most_lag // 5)),
        _line([(x(step.step), lag_y(step.lag)) for step in trained], LAG, 2),
        *_legend([(WASTE, "waste: share of the sampled tokens, so far, that became too old")], waste_top - 12),
        *(_grid(waste_y(value), f"{100 * value:.0f} %") for value in (0, most_waste)),
        _line([(x(step.step), waste_y(share)) for step, share in zip(trained, wasted, strict=True)], WASTE, 2),
        *(_text(x(step), bottom + 18, str(step), fill=PALE, anchor="middle") for step in _ticks(last)),
        _text(WIDTH - RIGHT, bottom + 36, "step", fill=PALE, anchor="end"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" role="img" aria-label="Reward, lag and waste by step">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def draw(steps: Sequence[Step], file: Path) -> None:
    """Write the picture, in place of an older one of the same training; nothing without a step."""
    if any(step.step for step in steps):
        new = file.with_suffix(".new")
        new.write_text(picture(steps))
        new.replace(file)


def _running_mean(steps: Sequence[Step]) -> Iterable[tuple[Step, float]]:
    for end, step in enumerate(steps, 1):
        recent = steps[max(0, end - AVERAGED) : end]
        yield step, sum(one.reward for one in recent) / len(recent)


def _ticks(last: int) -> range:
    size = next(size for size in (1, 2, 5, 10, 20, 50, 100, 1000) if last / size <= 12 or size == 1000)
    return range(0, last + 1, size)


def _mark(point: Point, value: float) -> str:
    x = min(point[0], WIDTH - RIGHT - 14)
    return _text(x, point[1] + 20, f"{value:.2f}", fill=HELD_OUT, anchor="middle", weight="bold")


def _legend(entries: Sequence[tuple[str, str]], y: float) -> Iterable[str]:
    x = float(LEFT)
    for color, label in entries:
        yield f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" rx="2" fill="{color}"/>'
        yield _text(x + 16, y, label)
        x += 44 + 6.6 * len(label)


def _grid(y: float, label: str) -> str:
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
    return line + _text(LEFT - 8, y + 4, label, fill=PALE, anchor="end")


def _line(points: Iterable[Point], color: str, width: float, *, dashes: str = "none") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'fill="none" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}" stroke-linejoin="round"'
    return f'<polyline points="{path}" {style}/>'


def _dot(point: Point, radius: float, color: str) -> str:
    return f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="{radius}" fill="{color}"/>'


def _text(
    x: float, y: float, text: str, *, fill: str = INK, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    style = f'fill="{fill}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>'


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    draw(read(directory / "steps.jsonl"), directory / "learning.svg")
    print(directory / "learning.svg")
