"""Tracebacks as plain data: which frames are the person's own, and what untrusted code can put into them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kuberoll_workers.data.plain import NotPlain, plain
from kuberoll_workers.data.tracebacks import (
    MAX_FRAMES,
    MAX_TEXT,
    Frame,
    Traceback,
    excerpt,
    location,
    near_path,
    parse_traceback,
    traceback_of,
)

MINE = """
import asyncio
import json


def grade(text):
    return check(text)


def check(text):
    return json.loads(text)


def recurse(depth):
    return recurse(depth + 1)


def chained():
    try:
        {}["answers"]
    except KeyError as error:
        raise ValueError("no answers") from error


async def together():
    async with asyncio.TaskGroup() as group:
        group.create_task(fails())


async def fails():
    raise OSError("the judge is gone")


def sort(key):
    return sorted([1, 2], key=key)


class Evil(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


def evil():
    raise Evil


def escape():
    raise ValueError("\\x1b[31mred\\ud800 \\u202e")
"""


@pytest.fixture
def mine(tmp_path: Path) -> ModuleType:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raised(call: object, *arguments: object) -> Traceback:
    assert callable(call)
    with pytest.raises(BaseException) as caught:
        call(*arguments)
    # Without this function's own frame, as an executor sees it.
    assert caught.value.__traceback__ is not None
    found = traceback_of(caught.value.with_traceback(caught.value.__traceback__.tb_next))
    assert found is not None
    return found


def lines(found: Traceback) -> list[tuple[str, str, bool]]:
    return [(Path(frame.file).name, frame.function, frame.own) for frame in found.frames]


def test_own_frames_and_where_a_library_raised(mine: ModuleType, tmp_path: Path) -> None:
    found = raised(mine.grade, "2,3")
    assert lines(found) == [("mine.py", "grade", True), ("mine.py", "check", True), ("decoder.py", "decode", False)]
    assert found.frames[1] == Frame(str(tmp_path / "mine.py"), 11, "check", "return json.loads(text)")
    assert location(found.frames).endswith("mine.py:11 in check")
    assert [line.strip() for line in excerpt(found.frames, 1)][:2] == [
        location(found.frames), "return json.loads(text)",
    ]  # fmt: skip
    assert found.text.startswith("Traceback (most recent call last):\n")
    assert found.text.endswith("json.decoder.JSONDecodeError: Extra data: line 1 column 2 (char 1)\n")
    assert "json/__init__.py" in found.text


def test_a_library_between_own_frames_is_left_out(mine: ModuleType) -> None:
    def key(_: int) -> int:
        raise IndexError("no key")

    assert [(name, own) for name, _, own in lines(raised(mine.sort, key))] == [
        ("mine.py", True), ("test_tracebacks.py", True),
    ]  # fmt: skip


def test_the_exceptions_before_it_are_in_the_text(mine: ModuleType) -> None:
    found = raised(mine.chained)
    assert "KeyError: 'answers'" in found.text
    assert "The above exception was the direct cause" in found.text
    assert lines(found) == [("mine.py", "chained", True)]


def test_a_recursion_is_bounded(mine: ModuleType) -> None:
    found = raised(mine.recurse, 0)
    assert lines(found) == [("mine.py", "recurse", True)]
    assert len(found.text) <= MAX_TEXT + 100


def test_a_group_shows_its_first_exception(mine: ModuleType) -> None:
    import asyncio

    assert lines(raised(lambda: asyncio.run(mine.together())))[-1] == ("mine.py", "fails", True)


def test_a_syntax_error_is_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ny = (\n")
    sys.path.insert(0, str(tmp_path))
    try:
        found = raised(__import__, "broken")
    finally:
        sys.path.remove(str(tmp_path))
    assert location(found.frames) == f"{tmp_path.name}/broken.py:2 in <module>"
    assert found.frames[-1].source == "y = ("


def test_kuberoll_s_frames_are_not_the_person_s(mine: ModuleType) -> None:
    def step() -> None:
        plain({"x": float("nan")}, "metadata")

    with pytest.raises(NotPlain):
        step()
    assert [name for name, _, _ in lines(raised(step))] == ["test_tracebacks.py"]
    (only,) = raised(plain, {1}, "metadata").frames
    assert only.file.endswith("data/plain.py")


def test_classes_that_cannot_be_shown_have_no_text_of_their_own(mine: ModuleType) -> None:
    found = raised(mine.evil)
    assert "Evil" in found.text
    assert lines(found) == [("mine.py", "evil", True)]


def test_control_characters_are_shown_as_symbols(mine: ModuleType) -> None:
    text = raised(mine.escape).text
    assert "ValueError: ␛[31mred⟨U+D800⟩ ⟨U+202E⟩" in text
    text.encode()


def test_what_another_process_sends_is_bounded() -> None:
    frame = Frame("/x" * 5000, 1, "f\n\x1b[2J" * 1000, "s" * 10_000)
    found = Traceback((frame,) * 1000, "\x1b" + "t" * 1_000_000).bounded()
    assert len(found.frames) == MAX_FRAMES + 1
    assert all(len(part) <= 1024 for frame in found.frames for part in (frame.file, frame.function, frame.source))
    assert len(found.text) < MAX_TEXT + 100
    assert "\x1b" not in "".join([found.text, *(frame.function for frame in found.frames)])
    assert "\n" not in found.frames[0].function


def test_a_printed_traceback(mine: ModuleType) -> None:
    found = raised(mine.grade, "2,3")
    parsed = parse_traceback(f"ray::Env.step() (pid=1)\n{found.text}")
    assert parsed is not None
    assert parsed.frames == found.frames
    assert parse_traceback("ValueError: nothing of a traceback") is None


def test_paths_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert near_path(str(tmp_path / "envs" / "guess.py")) == "envs/guess.py"
    assert near_path("/elsewhere/guess.py") == "/elsewhere/guess.py"
    assert location([Frame("/elsewhere/deep/guess.py", 3, "step")]) == "deep/guess.py:3 in step"
    assert location([]) == ""
