"""From records to what a report shows."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
import zlib
from importlib.resources import files
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from kuberoll_workers.analysis.report.data import ReportData
from kuberoll_workers.analysis.report.page import render
from kuberoll_workers.analysis.report.row import row_of
from kuberoll_workers.analysis.report.trajectory_sample import MESSAGE_CHARACTERS, TRAJECTORY_CHARACTERS, readable
from kuberoll_workers.data.stop_reasons import OUTCOMES
from kuberoll_workers.data.text import cut, one_line, visible
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_directory import RunManifest
from kuberoll_workers.output.run_files import RunFiles
from tests.analysis.report.runs import dropped, failure, message, realistic, report_of, store, trajectory


def data(*records: EndedRecord, **options: Any) -> ReportData:
    return report_of(records, **options)


def test_every_trajectory_once(tmp_path: Path) -> None:
    retried = failure(5, number=1)
    retried.attempt = 1
    later = dropped(7)
    later.attempt = 1
    unwanted = dropped(1)
    records: list[EndedRecord] = [
        trajectory(1),
        trajectory(2),
        failure(2),
        retried,
        failure(5),
        unwanted,
        dropped(6),
        failure(6, 1),
        failure(7),
        later,
    ]
    store(tmp_path, records)
    store(tmp_path, [trajectory(1)])
    found = [(type(record).__name__, *record.key) for record in RunFiles(str(tmp_path)).read()]
    assert found == [
        ("TrajectoryRecord", 1, 0), ("TrajectoryRecord", 2, 0), ("FailureRecord", 5, 0), ("FailureRecord", 6, 1),
        ("DroppedRecord", 6, 0), ("DroppedRecord", 7, 0),
    ]  # fmt: skip
    (latest,) = [record for record in RunFiles(str(tmp_path)).read() if record.task_index == 5]
    assert latest.attempt == 1


def test_reading_goes_no_further_than_asked(tmp_path: Path) -> None:
    store(tmp_path, [trajectory(1), trajectory(2)])
    with (tmp_path / "shard-00000.jsonl").open("ab") as file:
        file.write(b"broken\n")
    first = iter(RunFiles(str(tmp_path)).read())
    assert next(first).task_index == 1


def test_numbers_by_environment_and_over_all() -> None:
    found = data(
        trajectory(0, 0, rewards=[1.0, 0.5], seconds=[(1.0, 2.0), (3.0, 4.0)]),
        trajectory(0, 1, rewards=[0.0], stop_reason="truncated"),
        trajectory(1, 0, environment="math", rewards=[1.0]),
        trajectory(1, 1, environment="math", rewards=[1.0]),
        trajectory(3, 0, environment="math", rewards=[0.0]),
        failure(2, environment="math"),
        dropped(2, 1),
    ).numbers
    assert [item["name"] for item in found["environments"]] == ["math", "puzzle"]
    maths, puzzle = found["environments"]
    everything = found["all"]
    assert (maths["finished"], puzzle["finished"], everything["finished"]) == (3, 2, 5)
    assert puzzle["outcomes"] == {"terminated": 1, "truncated": 1, "oversampled": 1}
    assert maths["causes"] == [
        ("infrastructure", "generation", "the endpoint is gone after 5 tries: connection refused", 1)
    ]
    # A failure is never a reward of 0, and what was dropped is no reward either.
    assert everything["reward"]["count"] == 5
    assert everything["reward"]["mean"] == pytest.approx(0.7)
    assert puzzle["generation_seconds"]["total"] == 4.5
    assert puzzle["environment_seconds"]["total"] == 6.25
    # Of one reward there is no spread; groups at their environment's highest reward stay that over all.
    assert maths["groups"] == {
        "groups": 1, "equal": 1, "highest": 1, "lowest": 0, "mean_std": 0.0, "points": [(1.0, 0.0, 1)],
    }  # fmt: skip
    assert (everything["groups"]["groups"], everything["groups"]["highest"]) == (2, 1)
    assert puzzle["groups"]["points"] == [(0.75, pytest.approx(1.0606601717798212), 1)]


def test_groups_beyond_what_can_be_drawn() -> None:
    records = [trajectory(task, rollout, rewards=[task * 0.001 + rollout]) for task in range(900) for rollout in (0, 1)]
    groups = data(*records).numbers["all"]["groups"]
    assert sum(count for _, _, count in groups["points"]) == 900
    assert len(groups["points"]) < 100
    assert all(std > 0 for _, std, _ in groups["points"])


def test_points_of_a_grid_are_near_the_groups_that_they_stand_for() -> None:
    """Means within half a cell of 40; deviations rounded up, so that what has none looks so."""
    rewards = [(task * 0.001, task * 0.001 + (task % 30) * 0.1) for task in range(900)]
    records = [
        trajectory(task, rollout, rewards=[reward])
        for task, pair in enumerate(rewards)
        for rollout, reward in enumerate(pair)
    ]
    groups = data(*records).numbers["all"]["groups"]
    assert len(groups["points"]) < 900
    means, stds = [sum(pair) / 2 for pair in rewards], [stdev(pair) for pair in rewards]
    wide, high = (max(means) - min(means)) / 40, (max(stds) - min(stds)) / 24

    def near(mean: float, std: float) -> list[tuple[float, float, int]]:
        return [
            point
            for point in groups["points"]
            if abs(point[0] - mean) <= wide / 2 + 1e-9 and -1e-9 <= point[1] - std < high + 1e-9
        ]

    assert all(near(mean, std) for mean, std in zip(means, stds, strict=True))
    assert sum(count for _, std, count in groups["points"] if std == 0) == sum(std == 0 for std in stds) == 30


def test_tokens_of_what_failed_are_counted_by_who_wrote_them() -> None:
    record = failure(0)
    record.messages = [
        message("user", "x" * 4, 0),
        message("assistant", "x" * 8, 1),
        message("assistant", "x" * 16, 1),
        message("environment", "x" * 32, 1),
        message("environment", "x" * 64, 2),
    ]
    row = row_of(record)
    assert (row.prompt_tokens, row.generated_tokens, row.environment_tokens) == (2, 3 + 5, 9 + 17)


def test_a_run_s_settings_and_plan_head_the_page() -> None:
    manifest = RunManifest(
        format=1,
        job="first",
        created="2026-01-01T00:00:00+00:00",
        shards=2,
        identity={"dataset.repeats": 8, "generation.model.source": "org/model", "rollout.groups.wanted": None},
        inputs={"rows": 5, "trajectories": 40},
        versions={"ray": "2.0"},
    )
    head = data(manifest=manifest).head
    assert head == {
        "location": "runs/one",
        "job": "first",
        "created": "2026-01-01T00:00:00+00:00",
        "planned": 40,
        "settings": [("dataset.repeats", "8"), ("generation.model.source", "org/model"), ("versions.ray", "2.0")],
    }
    manifest.identity["rollout.groups.wanted"] = 3
    assert data(manifest=manifest).head["planned"] is None
    assert data().head == {"location": "runs/one", "job": None, "created": None, "planned": None, "settings": []}


def test_causes_are_told_by_count_and_bounded() -> None:
    failures = [failure(number) for number in range(1500)]
    for number, record in enumerate(failures):
        record.cause = f"cause {number}" if number % 2 else "the same\nover two lines"
    found = data(*failures).numbers["all"]
    assert found["causes"][0][2:] == ("the same over two lines", 750)
    assert len(found["causes"]) == 50
    assert sum(cause[3] for cause in found["causes"]) + found["other_causes"] == 1500


def test_the_sample_has_every_failure() -> None:
    records: list[EndedRecord] = [
        *(trajectory(task) for task in range(1000)), *(failure(task, 1) for task in range(15)),
        *(dropped(task, 2) for task in range(40)),
    ]  # fmt: skip
    found = data(*records, most=100)
    outcomes = [item.row.outcome for item in found.browsed]
    assert (len(outcomes), outcomes.count("failed"), outcomes.count("oversampled")) == (100, 15, 10)
    assert found.offered == 1055
    assert found.numbers["all"]["finished"] == 1000


def test_the_size_of_the_page_is_bounded() -> None:
    def noisy(task: int) -> EndedRecord:
        text = "".join(chr(0x4E00 + (task * 7919 + place * 104729 + place**3) % 20000) for place in range(5000))
        return trajectory(task, messages=[message("assistant", text, 1)])

    small, large = (
        render(report_of(map(noisy, range(count)), location="r", most_bytes=200_000)) for count in (50, 400)
    )
    assert len(large) < 1.4 * 200_000 + 150_000
    assert abs(len(large) - len(small)) < 100_000


def test_long_texts_are_cut_with_a_note() -> None:
    assert cut("a" * 10, 10) == "a" * 10
    assert cut("a" * 8 + "b" * 12, 8) == "aaaaaa\n[… 12 characters left out …]\nbb"
    long = trajectory(0, messages=[message("user", "x" * 50_000, 0), message("assistant", "short", 1)])
    shown = readable(long)["messages"]
    assert len(shown[0]["text"]) < MESSAGE_CHARACTERS + 100
    assert "30,000 characters left out" in shown[0]["text"]
    assert shown[1]["text"] == "short"
    many = readable(trajectory(0, messages=[message("tool", "y" * 900, turn) for turn in range(1000)]))
    assert (len(many["messages"]), many["left_out"], many["messages"][-1]["turn"]) == (250, 750, 999)
    assert sum(len(item["text"]) for item in many["messages"]) < TRAJECTORY_CHARACTERS * 1.2


def test_control_characters_become_signs() -> None:
    assert visible("a\x1b[31mb\r\n\tc\x00\x7f\x9b\u202ed") == "a␛[31mb␍\n\tc␀␡⟨U+009B⟩⟨U+202E⟩d"
    assert one_line("  a\n\x07 b ", 20) == "a ␇ b"
    assert one_line("abcdef", 4) == "abc…"


def test_a_page_needs_nothing_else() -> None:
    page = render(data(*realistic(6))).decode()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert page.count("<script>") == 1


def test_the_same_records_make_the_same_page() -> None:
    assert render(data(*realistic(6))) == render(data(*realistic(6)))


def test_texts_are_in_the_page_as_they_were() -> None:
    (item,) = data(trajectory(0, messages=[message("user", "hé", 0)])).browsed
    shown = orjson.loads(zlib.decompress(item.text))
    assert shown["messages"] == [
        {"role": "user", "turn": 0, "text": "hé", "tokens": 1, "truncated": False, "sampled": False}
    ]
    assert shown["seed"] == str(2**62)


def test_chunks_are_bounded_by_texts_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from kuberoll_workers.analysis.report import page

    many: Any = [SimpleNamespace(text=zlib.compress(b"a"))] * 150
    assert [(start, len(some)) for start, some in page._batches(many)] == [(0, 64), (64, 64), (128, 22)]
    monkeypatch.setattr(page, "_CHUNK_BYTES", 100)
    texts = [b"a" * size for size in (60, 40, 1, 300, 99, 1, 1, 50, 50, 50)]
    browsed: Any = [SimpleNamespace(text=zlib.compress(text)) for text in texts]
    batches = list(page._batches(browsed))
    assert [text for _, some in batches for text in some] == texts
    assert [start for start, _ in batches] == [0, 2, 3, 4, 6, 8]
    monkeypatch.setattr(page, "_CHUNK", 2)
    assert max(len(some) for _, some in page._batches(browsed)) == 2
    assert list(page._batches([])) == []


def test_the_beginning_and_the_end_of_many_messages_are_shown() -> None:
    from kuberoll_workers.analysis.report.trajectory_sample import _MOST_MESSAGES, _kept

    for count in (0, 1, _MOST_MESSAGES, _MOST_MESSAGES + 1, 3 * _MOST_MESSAGES):
        messages = [message("tool", str(number), number) for number in range(count)]
        kept, left_out = _kept(messages, _MOST_MESSAGES)
        assert (len(kept), left_out) == (min(count, _MOST_MESSAGES), max(0, count - _MOST_MESSAGES))
        assert [item.turn for item in kept[: _MOST_MESSAGES // 2]] == list(range(min(count, _MOST_MESSAGES // 2)))
        assert count == 0 or kept[-1].turn == count - 1


def test_the_numbers_of_all_environments_are_of_none_of_them() -> None:
    assert data(trajectory(0)).numbers["all"]["name"] == ""


def blocks(page: str) -> dict[str, str]:
    """The page's data by the ids of their elements."""
    return dict(re.findall(r'<script type="[a-z/]+" id="([a-z0-9-]+)">(.*?)</script>', page, re.DOTALL))


def unpacked(text: str) -> Any:
    packed = base64.b64decode(text)
    # No time of its making, so that the same data make the same page.
    assert packed[4:8] == bytes(4)
    return orjson.loads(gzip.decompress(packed))


def test_the_page_has_what_its_script_reads() -> None:
    whole = trajectory(3, 1, rewards=[0.25, 0.5], seconds=[(0.5, 0.25), (1.0, 0.125)])
    found = data(whole, trajectory(1, environment="math"), failure(2, environment="math"), dropped(4, 2))
    parts = blocks(render(found).decode())
    document = orjson.loads(parts["data"])
    assert set(document) == {"head", "numbers", "endings", "browsed"}
    assert tuple(document["endings"]) == OUTCOMES
    assert document["endings"]["max_turns"] == {"title": "max turns", "kind": "finished", "look": "limit"}
    assert document["browsed"] == {"count": 4, "offered": 4, "starts": [0]}
    assert set(document["numbers"]["all"]) == {
        "name", "finished", "outcomes", "causes", "other_causes", "reward", "turns", "prompt", "generated", "observed",
        "generation_seconds", "environment_seconds", "groups", "throughput", "distance", "versions",
        "sandboxes", "removal",
    }  # fmt: skip
    assert unpacked(parts["index"]) == {
        "environments": ["math", "puzzle"],
        "outcomes": list(OUTCOMES),
        "task": [3, 1, 2, 4],
        "rollout": [1, 0, 0, 2],
        "environment": [1, 0, 0, 1],
        "outcome": [0, 0, 3, 4],
        "reward": [0.75, 1.0, None, 0.0],
        "turns": [2, 1, 0, 1],
        "prompt": [1, 1, 1, 2],
        "generated": [1, 1, 0, 2],
        "observed": [0, 0, 0, 0],
        "seconds": [1.875, 0.75, None, None],
    }
    assert unpacked(parts["chunk-0"]) == [orjson.loads(zlib.decompress(item.text)) for item in found.browsed]


def test_a_page_allows_itself_its_own_script_and_style_and_nothing_else() -> None:
    page = render(data()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    allowed = dict(part.strip().split(" ", 1) for part in html.unescape(policy).split(";") if part.strip())
    (style,), (script,) = (
        re.findall(r"<style>(.*?)</style>", page, re.DOTALL),
        re.findall(r"<script>(.*?)</script>", page, re.DOTALL),
    )

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert allowed == {
        "default-src": "'none'", "style-src": digest(style), "script-src": digest(script), "base-uri": "'none'",
        "form-action": "'none'",
    }  # fmt: skip
    # Nothing but the page's own programs.
    assets = files("kuberoll_workers.analysis.report").joinpath("assets")
    for part in assets.iterdir():
        if part.name.endswith(".js") and part.name != "comparison.js":
            assert script.count(part.read_text("utf-8")) == 1
            script = script.replace(part.read_text("utf-8"), "")
    assert script.strip() == ""


def test_what_a_page_shows_of_each_kind_of_trajectory() -> None:
    messages = [message("user", "hi", 0), message("assistant", "yes", 1, truncated=True)]
    shown = [
        {"role": "user", "turn": 0, "text": "hi", "tokens": 1, "truncated": False, "sampled": False},
        {"role": "assistant", "turn": 1, "text": "yes", "tokens": 1, "truncated": True, "sampled": True},
    ]
    whole = trajectory(1, messages=messages, rewards=[0.25, 0.5])
    whole.reward_parts, whole.answer, whole.attempt = {"right\n": [0.0, 0.5]}, "4\x00", 2
    assert readable(whole) == {
        "messages": shown,
        "left_out": 0,
        "idx": '"row-1"',
        "seed": str(2**62 + 1),
        "attempt": 2,
        "rewards": [0.25, 0.5],
        "metadata": '{"moves":2}',
        "parts": {"right": [0.0, 0.5]},
        "answer": "4␀",
        "generation": [0.5, 0.5],
        "environment": [0.25, 0.25],
    }
    other = dropped(1)
    assert readable(other) == {
        "messages": shown[:1],
        "left_out": 0,
        "idx": None,
        "seed": None,
        "attempt": 0,
        "rewards": [0.0],
        "metadata": None,
        "dropped": "oversampled",
        "stop_reason": None,
    }
    lost = failure(1, number=1)
    lost.cause = "c" * 5000
    found = readable(lost)
    assert found["failure"]["cause"].startswith("c" * 1500)
    assert "3,000 characters left out" in found["failure"].pop("cause")
    assert found == {
        "messages": shown[:1],
        "left_out": 0,
        "idx": None,
        "seed": "1",
        "attempt": 0,
        "metadata": None,
        "failure": {"kind": "environment", "stage": "step", "tries": 5},
    }
    lost.traceback, lost.row = "Traceback\n" + "t" * 20_000, "rows.jsonl:7\x00"
    found = readable(lost)["failure"]
    assert found["traceback"].startswith("Traceback\nttt")
    assert "4,010 characters left out" in found["traceback"]
    assert found["row"] == "rows.jsonl:7␀"
    # As many turns as people look at.
    endless = trajectory(1, rewards=[0.5] * 1500)
    endless.reward_parts = {"right": [0.5] * 1500}
    long = readable(endless)
    assert {len(long[name]) for name in ("rewards", "generation", "environment")} == {1000}
    assert len(long["parts"]["right"]) == 1000


def test_failures_and_dropped_ones_leave_most_of_the_room_to_finished_ones() -> None:
    def noisy(number: int) -> str:
        return "".join(chr(0x4E00 + (number * 7919 + place * 104729 + place**3) % 20000) for place in range(2000))

    def with_text(record: Any, number: int) -> EndedRecord:
        record.messages = [message("user", noisy(number), 0)]
        found: EndedRecord = record
        return found

    records = [
        *(with_text(trajectory(task), task) for task in range(100)),
        *(with_text(failure(task, 1), 1000 + task) for task in range(100)),
        *(with_text(dropped(task, 2), 2000 + task) for task in range(100)),
    ]
    found = data(*records, most_bytes=100_000).browsed
    used = {kind: sum(len(item.text) for item in found if item.row.outcome == kind) for kind in OUTCOMES}
    assert 10_000 < used["failed"] <= 25_000
    assert 5_000 < used["oversampled"] <= 12_500
    assert 50_000 < used["terminated"] <= 100_000 - used["failed"] - used["oversampled"]


def test_the_numbers_of_a_field() -> None:
    records = [trajectory(task, rewards=[reward]) for task, reward in enumerate([0.0, 1.0, 1.0, 2.0, 4.0])]
    numbers = data(*records).numbers["all"]
    reward = numbers["reward"]
    assert {name: reward[name] for name in ("count", "nonfinite", "mean", "min", "median", "max", "p90", "total")} == {
        "count": 5, "nonfinite": 0, "mean": 1.6, "min": 0.0, "median": 1.0, "max": 4.0, "p90": 4.0, "total": 8.0,
    }  # fmt: skip
    assert reward["std"] == pytest.approx(stdev([0, 1, 1, 2, 4]))
    whole = [numbers[name]["whole"] for name in ("reward", "turns", "prompt", "generated", "observed")]
    assert whole == [False, True, True, True, True]
    assert numbers["generation_seconds"]["whole"] is numbers["environment_seconds"]["whole"] is False
    nothing = data(failure(1)).numbers["all"]["reward"]
    assert (nothing["p90"], nothing["total"], nothing["count"], nothing["bars"]) == (None, 0.0, 0, [])
