"""Which parts of a directory are left out of its archive, as `tar --exclude` does."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.harbor.artifacts import without

NAMES = ["a", "b.tmp", "in/a", "in/b.tmp", "in/deep/c", "other/in/a", "x*y"]


def archive(directory: Path, *options: str) -> bytes:
    return subprocess.run(["tar", "-C", directory, *options, "-cf", "-", "."], capture_output=True, check=True).stdout


def names(content: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(content)) as opened:
        return set(opened.getnames())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("artifacts")
    for name in NAMES:
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(name)
    return found


@pytest.mark.slow
@given(
    patterns=st.lists(
        st.sampled_from(["*.tmp", "in", "in/*", "a", "deep/c", "o*", "d??p", "x[*]y", "none"]), max_size=3
    )
)
def test_patterns_leave_out_what_tar_does(directory: Path, patterns: list[str]) -> None:
    options = [f"--exclude={pattern}" for pattern in patterns]
    assert names(without(archive(directory), patterns)) == names(archive(directory, *options))


def test_contents_stay(directory: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(without(archive(directory), ["*.tmp"]))) as opened:
        file = opened.extractfile("./in/a")
        assert file is not None
        assert file.read() == b"in/a"


@pytest.mark.parametrize(
    ("target", "stays"),
    [
        ("/etc/passwd", False),
        ("../outside", False),
        ("sub/../../outside", False),
        ("sub/a", True),
        ("none", True),
        (".", True),
    ],
)
def test_links_out_of_the_directory_do_not_come_along(target: str, stays: bool, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a").write_text("a")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "sub/up").symlink_to("../sub/a")
    found = names(without(archive(tmp_path), []))
    assert found == {".", "./sub", "./sub/a", "./sub/up"} | ({"./link"} if stays else set())
