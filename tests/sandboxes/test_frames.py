"""Frames of sandboxes, what is kept of outputs, and whom images name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.guest import users
from kuberoll_workers.sandboxes.guest.frames import Decoder, InvalidFrame, encode
from kuberoll_workers.sandboxes.guest.operations import Outputs
from tests.sandboxes.layouts import GROUP, PASSWD

headers = st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.none(), max_size=3).map(
    lambda found: {**found, "kind": "a"}
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


@given(st.lists(st.tuples(headers, st.binary(max_size=300)), max_size=5), st.lists(st.integers(0, 2000), max_size=8))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    frames: list[tuple[dict[str, Any], bytes]], cuts: list[int]
) -> None:
    decoder = Decoder()
    data = b"".join(encode(header, payload) for header, payload in frames)
    found = [frame for piece in pieces(data, cuts) for frame in decoder.feed(piece)]
    assert found == frames


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_refused_or_waited_for(data: bytes) -> None:
    try:
        for header, _ in Decoder().feed(data):
            assert isinstance(header["kind"], str)
    except InvalidFrame:
        pass


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\0\0\0\x02\0\0\0\0[]", b"\0\0\0\x02\0\0\0\0{}"])
def test_what_can_be_no_frame_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(InvalidFrame):
        list(Decoder().feed(data))


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(0, 300))
def test_of_an_output_that_is_too_long_beginning_and_end_are_sent(parts: list[bytes], limit: int) -> None:
    sent = bytearray()
    skipped = 0

    def send(header: dict[str, Any], payload: bytes) -> None:
        nonlocal skipped
        skipped += header.get("skipped", 0)
        sent.extend(payload)

    outputs = Outputs("stdout", limit, send)
    for part in parts:
        outputs.take(part)
    outputs.end()
    whole = b"".join(parts)
    assert len(sent) + skipped == len(whole)
    if len(whole) <= limit:
        assert bytes(sent) == whole
    else:
        half = limit // 2
        assert bytes(sent) == whole[:half] + whole[len(whole) - (limit - half) :]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "passwd").write_text(PASSWD + "broken\nbad:x:one:two:::\n")
    (tmp_path / "group").write_text(GROUP)
    monkeypatch.setattr(users, "_PASSWD", str(tmp_path / "passwd"))
    monkeypatch.setattr(users, "_GROUP", str(tmp_path / "group"))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("root", users.User(0, 0, (), "root", "/root")),
        ("app", users.User(1000, 1000, (10,), "app", "/home/app")),
        ("1000", users.User(1000, 1000, (10,), "app", "/home/app")),
        ("app:0", users.User(1000, 0, (10,), "app", "/home/app")),
        ("app:wheel", users.User(1000, 10, (10,), "app", "/home/app")),
        ("4321", users.User(4321, 0)),
        ("4321:99", users.User(4321, 99)),
    ],
)
def test_users_are_those_of_the_images_own_files(files: Path, text: str, user: users.User) -> None:
    assert users.find(text) == user


@pytest.mark.parametrize("text", ["nobody", "app:nobody", "bad"])
def test_a_user_that_the_image_has_not_is_named(files: Path, text: str) -> None:
    with pytest.raises(users.UnknownUser, match="the image has no"):
        users.find(text)


def test_an_image_without_users_has_numbers(files: Path) -> None:
    (files / "passwd").unlink()
    (files / "group").unlink()
    assert users.find("7:8") == users.User(7, 8)
    with pytest.raises(users.UnknownUser, match="root"):
        users.find("root")
