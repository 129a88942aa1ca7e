"""The comparison of two runs: what differs, by how much, and for which tasks."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis.comparison import compare as compare_module
from kuberoll_workers.analysis.comparison.compare import MOST_TASKS, Comparison, NotComparable, compare_runs
from kuberoll_workers.analysis.comparison.metrics import Metric, TaskValues, compare
from kuberoll_workers.analysis.comparison.page import render
from kuberoll_workers.analysis.comparison.settings import compare_settings
from kuberoll_workers.analysis.statistics import paired_difference, unpaired_difference
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_directory import MANIFEST, RunManifest
from kuberoll_workers.output.run_files import RunFiles
from tests.analysis.report.conftest import Open
from tests.analysis.report.runs import dropped, failure, realistic, store, trajectory


def manifest(
    settings: Mapping[str, Any] | None = None, *, digest: str = "d", rows: int = 3, code: str = "c"
) -> RunManifest:
    return RunManifest(
        format=1,
        job="job",
        created="2026-01-01T00:00:00+00:00",
        shards=1,
        identity={"environments[0].name": "puzzle", "dataset.repeats": 2, **(settings or {})},
        inputs={"rows": rows, "trajectories": 2 * rows, "digest": digest},
        versions={"kuberoll": "1"},
        code={"puzzle": code},
    )


def run(place: Path, records: Iterable[EndedRecord], settings: RunManifest | None = None) -> RunFiles:
    store(place, records)
    if settings is not None:
        (place / MANIFEST).write_bytes(orjson.dumps(settings))
    return RunFiles(str(place))


def rewarded(rewards: Iterable[Iterable[float]], **options: Any) -> list[EndedRecord]:
    return [
        trajectory(task, rollout, rewards=[reward], **options)
        for task, group in enumerate(rewards)
        for rollout, reward in enumerate(group)
    ]


def of(tmp_path: Path, first: Any, second: Any, **other: Any) -> Comparison:
    return compare_runs(run(tmp_path / "a", first, manifest()), run(tmp_path / "b", second, manifest(**other)))


def metrics(comparison: Comparison, name: str = "") -> dict[str, Metric]:
    parts = {part.name: part for part in comparison.environments}
    return {metric.name: metric for metric in parts.get(name, comparison.environments[0]).metrics}


FLOATS = st.lists(st.floats(-100, 100), min_size=2, max_size=30)


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=2, max_size=30))
def test_the_interval_of_pairs_is_that_of_their_differences(pairs: list[tuple[float, float]]) -> None:
    first, second = (np.array(side) for side in zip(*pairs, strict=True))
    found = paired_difference(first, second)
    assert found.low is not None
    assert found.high is not None
    assert found.difference is not None
    assert found.difference == pytest.approx(statistics.fmean((second - first).tolist()), abs=1e-9)
    assert found.low <= found.difference <= found.high
    # The other way round it is the same.
    back = paired_difference(second, first)
    assert [back.low, back.high] == pytest.approx([-found.high, -found.low], abs=1e-9)


def test_intervals_known_from_elsewhere() -> None:
    # Student's own data: additional hours of sleep with two drugs, "The probable error of a mean", 1908.
    one = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
    two = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    assert paired_difference(one, two)[3:] == pytest.approx((1.58, 0.7001142, 2.4598858), abs=1e-6)
    # R's t.test(two, one): 17.776 degrees of freedom, here rounded down.
    found = unpaired_difference(one, two)
    assert found.difference == pytest.approx(1.58)
    assert [found.low, found.high] == pytest.approx([-0.2054832, 3.3654832], abs=0.02)


@given(FLOATS, FLOATS)
def test_independent_means(first: list[float], second: list[float]) -> None:
    found = unpaired_difference(np.array(first), np.array(second))
    assert found.low is not None
    assert found.high is not None
    assert found.difference is not None
    assert found.low <= found.difference <= found.high
    assert math.isfinite(found.low)


def test_too_few_values_have_no_interval() -> None:
    nothing, one = np.array([]), np.array([2.0])
    assert paired_difference(nothing, nothing) == (0, None, None, None, None, None)
    assert paired_difference(one, one + 1) == (1, 2.0, 3.0, 1.0, None, None)
    assert unpaired_difference(nothing, one) == (0, None, 2.0, None, None, None)
    assert unpaired_difference(one, one + 1) == (1, 2.0, 3.0, 1.0, None, None)


def test_tasks_of_both_runs_are_pairs() -> None:
    def values(**by_task: float) -> TaskValues:
        tasks = np.array(sorted(map(int, (name[1:] for name in by_task))))
        return TaskValues(tasks, np.array([by_task[f"t{task}"] for task in tasks]))

    first = values(t1=0.0, t2=0.5, t5=math.nan, t9=1.0)
    second = values(t2=1.0, t5=1.0, t7=0.0, t9=1.0)
    found = compare("x", "share", first, second, paired=True).difference
    assert (found.size, found.first, found.second, found.difference) == (2, 0.75, 1.0, 0.25)
    # A share cannot change by more than all of it.
    assert (found.low, found.high) == (-1.0, 1.0)
    assert compare("x", "number", first, second, paired=True).difference.high == pytest.approx(
        0.25 + 0.25 * 12.7062, abs=1e-4
    )
    apart = compare("x", "share", first, second, paired=False).difference
    assert (apart.size, apart.first, apart.second) == (3, 0.5, 0.75)


def test_metrics_of_two_runs(tmp_path: Path) -> None:
    first = [*rewarded([[0, 0], [0, 1], [1, 1]]), failure(0, 2)]
    second = rewarded([[1, 1], [1, 1], [0, 1]], stop_reason="truncated")
    comparison = of(tmp_path, first, second, settings={"generation.sampling.temperature": 0.5})
    found = metrics(comparison)
    assert list(found) == [
        "success rate", "pass@2", "groups with signal", "turns", "generated tokens", "time in generation",
        "time in environment", "truncated", "max turns", "failed",
    ]  # fmt: skip
    assert all(metric.paired and metric.difference.size == 3 for metric in found.values())
    values: dict[str, Any] = {
        name: [metric.difference.first, metric.difference.second] for name, metric in found.items()
    }
    assert values["success rate"] == pytest.approx([0.5, 5 / 6])
    assert values["pass@2"] == pytest.approx([2 / 3, 1.0])
    assert values["groups with signal"] == pytest.approx([1 / 3, 1 / 3])
    assert values["truncated"] == [0.0, 1.0]
    assert values["failed"] == pytest.approx([1 / 9, 0.0])
    changes = comparison.environments[0].changes
    assert changes is not None
    assert (changes.better, changes.worse, changes.equal) == (2, 1, 0)
    assert [(task.task, task.difference) for task in changes.listed] == [(0, 1.0), (1, 0.5), (2, -0.5)]
    assert changes.listed[1].rollouts == ([(0, 0.0), (1, 1.0)], [(0, 1.0), (1, 1.0)])
    assert changes.points == [(0.0, 1.0, 1), (0.5, 1.0, 1), (1.0, 0.5, 1)]
    assert comparison.settings.different == [("generation.sampling.temperature", None, "0.5")]
    assert comparison.settings.notes == []
    # What can be read: the trajectories of these tasks, those that failed included.
    assert [item.row.name for item in comparison.browsed[0]] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "0.2"]


def test_rewards_of_any_size_are_numbers(tmp_path: Path) -> None:
    found = metrics(of(tmp_path, rewarded([[0.5, 1.5]] * 3), rewarded([[0.25, 3.5]] * 3)))
    assert (found["reward"].kind, found["best of 2"].kind) == ("number", "number")
    assert found["best of 2"].difference.difference == 2.0


def test_different_datasets_are_compared_without_pairs(tmp_path: Path) -> None:
    comparison = of(tmp_path, rewarded([[0, 1]] * 3), rewarded([[1, 1]] * 5), digest="e", rows=5)
    assert comparison.environments[0].changes is None
    found = metrics(comparison)["success rate"]
    assert (found.paired, found.difference.first, found.difference.second) == (False, 0.5, 1.0)
    assert comparison.settings.notes == [
        "the datasets differ (3 rows in A, 5 in B): tasks are not paired, and differences may come from the rows"
    ]
    assert ("dataset: digest", "d", "e") in comparison.settings.different


def test_what_limits_a_comparison_is_noted(tmp_path: Path) -> None:
    one = manifest({"environments[0].config.size": 2})
    two = manifest({"environments[0].config.size": 3, "generation.engine": "Simulated"}, code="other")
    two.forced = ["spec.x: was 1, is 2"]
    notes = compare_settings(one, two).notes
    assert [note.split(":")[0] for note in notes] == [
        "the environments differ (environments[0].config.size, code of environment puzzle)",
        "B is a run of the Simulated engine",
        "B was continued with --force and mixes parts with different settings",
    ]
    bare = compare_runs(run(tmp_path / "a", rewarded([[0]])), run(tmp_path / "b", rewarded([[1]]), one))
    assert "A has no manifest.json" in bare.settings.notes[0]
    assert bare.environments[0].changes is None
    assert "A and B have no manifest.json" in compare_settings(None, None).notes[0]
    mixed = of(tmp_path / "mixed", [*rewarded([[0]]), trajectory(7, environment="math")], rewarded([[1]]))
    assert mixed.settings.notes == ["only A has trajectories of math: they are not compared"]


def test_runs_with_nothing_in_common_are_refused(tmp_path: Path) -> None:
    puzzle = run(tmp_path / "a", rewarded([[0]]), manifest())
    maths = run(tmp_path / "b", [trajectory(0, environment="math")], manifest())
    nothing = run(tmp_path / "c", [failure(0), dropped(1)], manifest())
    with pytest.raises(NotComparable, match=r"share no environment: \S+/a has puzzle; \S+/b has math$"):
        compare_runs(puzzle, maths)
    with pytest.raises(NotComparable, match=r"/c has no finished trajectory$"):
        compare_runs(puzzle, nothing)
    with pytest.raises(NotComparable, match="twice: give two different runs"):
        compare_runs(puzzle, RunFiles(f"{puzzle.location}/"))


def test_many_tasks_are_bounded(tmp_path: Path) -> None:
    chance = random.Random(1)
    first = rewarded([[0.0, 1.0]] * 500)
    second = rewarded([[chance.random(), chance.random()] for _ in range(500)])
    changes = of(tmp_path, first, second).environments[0].changes
    assert changes is not None
    assert changes.better + changes.worse == 500
    differences = [task.difference for task in changes.listed]
    assert (len(differences), sum(value > 0 for value in differences)) == (2 * MOST_TASKS, MOST_TASKS)
    assert all(abs(one) >= abs(two) for one, two in itertools.pairwise(differences[:MOST_TASKS]))
    assert sum(count for _, _, count in changes.points) == 500


def test_a_run_and_its_copy_do_not_differ(tmp_path: Path) -> None:
    records = list(realistic(6))
    comparison = compare_runs(
        run(tmp_path / "a", records, manifest()), run(tmp_path / "b", list(realistic(6)), manifest())
    )
    assert [part.name for part in comparison.environments] == ["", "shell_repair", "sliding_puzzle", "word_problems"]
    for part in comparison.environments:
        assert all(metric.difference.difference in (0.0, None) for metric in part.metrics)
        assert part.changes is not None
        assert part.changes.listed == []
    # Then an even sample can be read.
    assert len(comparison.browsed[0]) == len(comparison.browsed[1]) == len(records)


def test_the_page_has_what_its_script_reads(tmp_path: Path) -> None:
    (text,) = re.findall(r'id="data">(.*?)</script>', differing(tmp_path).decode(), re.DOTALL)
    document = orjson.loads(text)
    assert set(document) == {"runs", "notes", "paired", "settings", "environments", "endings", "browsed"}
    assert document["paired"] is True
    assert document["settings"] == {"different": [["generation.sampling.temperature", None, "0.5"]], "equal": 7}
    everything, *parts = document["environments"]
    assert [part["name"] for part in (everything, *parts)] == ["", "shell_repair", "sliding_puzzle", "word_problems"]
    for part in (everything, *parts):
        assert set(part) == {"name", "metrics", "changes"}
        for metric in part["metrics"]:
            assert {"name", "kind", "paired", "first", "second", "difference", "low", "high"} <= set(metric)
    changes = everything["changes"]
    assert (changes["better"], changes["worse"], changes["equal"]) == (1, 1, 7)
    assert sum(count for _, _, count in changes["points"]) == 9
    better, worse = changes["listed"]
    assert [(task["task"], task["first"] < task["second"]) for task in (better, worse)] == [(3, True), (4, False)]
    assert better["environment"] == "sliding_puzzle"
    assert {rollout for rollout, _ in better["rollouts"][0]} == {rollout for rollout, _ in better["rollouts"][1]}


def differing(tmp_path: Path) -> bytes:
    records = [list(realistic(9)) for _ in range(2)]
    for record in records[1]:
        if record.task_index == 3 and not isinstance(record, type(failure(0))):
            record.total_reward, record.rewards[-1] = 5.0, 5.0  # type: ignore[union-attr]
        if record.task_index == 4 and not isinstance(record, type(failure(0))):
            record.total_reward, record.rewards[-1] = -5.0, -5.0  # type: ignore[union-attr]
    settings = manifest(), manifest({"generation.sampling.temperature": 0.5})
    comparison = compare_runs(
        *(run(tmp_path / name, side, own) for name, side, own in zip("ab", records, settings, strict=True))
    )
    return render(comparison)


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_task_leads_to_its_trajectories(opened: Open, tmp_path: Path, width: int, scheme: str) -> None:
    from playwright.sync_api import expect

    page = opened(
        page=differing(tmp_path), viewport={"width": width, "height": 900}, color_scheme=scheme,
        reduced_motion="reduce",
    ).page  # fmt: skip
    assert page.evaluate("document.documentElement.scrollWidth") == width
    expect(page.locator("#key")).to_contain_text("Better in B")
    expect(page.locator("#metrics tbody tr").first).to_contain_text("reward")
    expect(page.locator("#settings")).to_contain_text("generation.sampling.temperature")
    better = page.locator("#charts figure", has=page.get_by_role("heading", name="Better in B"))
    expect(better.locator("tbody tr")).to_have_count(1)
    better.get_by_role("link").last.click()
    expect(page.locator("#detail h3")).to_contain_text("#B3.")
    expect(page.locator("#detail .message").first).to_be_visible()
    expect(page.locator("#detail .bar").first).to_be_in_viewport()
    # Both runs' samples of a task, and those of one run.
    if width > 760:
        page.get_by_label("Text").fill("#4")
        shown = page.locator("#rows [role=option]")
        expect(shown.first).to_contain_text("#A4.0")
        expect(shown.nth(1)).to_contain_text("#B4.0")
        page.get_by_label("Text").fill("#b4")
        expect(shown.first).to_contain_text("#B4.0")
        expect(page.locator("#rows")).not_to_contain_text("#A4")
        page.get_by_role("combobox", name="Environment").select_option("word_problems")
        expect(page.get_by_role("heading", name="Better in B")).to_have_count(0)
        expect(page.get_by_role("heading", name="Worse in B")).to_have_count(1)


def test_a_comparison_without_pairs(opened: Open, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    comparison = of(tmp_path, rewarded([[0, 1]] * 3), rewarded([[1, 1]] * 5), digest="e", rows=5)
    page = opened(page=render(comparison)).page
    expect(page.locator("#notes")).to_contain_text("the datasets differ (3 rows in A, 5 in B)")
    expect(page.get_by_role("heading", name="Tasks")).to_be_hidden()
    expect(page.locator("#metrics")).to_contain_text("success rate")


def test_each_run_has_half_of_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "MOST", 9)
    records = rewarded([[0.0, 1.0]] * 5)
    # No task differs, so all can be read that there is room for.
    comparison = of(tmp_path, records, rewarded([[0.0, 1.0]] * 6), rows=4)
    assert [len(browsed) for browsed in comparison.browsed] == [4, 4]
