"""Archives that anybody may have made: what is within a directory, by `tarfile.data_filter`'s own rules."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.guest.files import check_within
from kuberoll_workers.sandboxes.handle import _unpack

names = st.lists(st.sampled_from(["a", "b", "..", ".", "link", "", "/etc"]), min_size=1, max_size=4).map("/".join)
kinds = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])


def member_of(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a link that leads out of it, and one that does not."""
    found = tmp_path_factory.mktemp("outer") / "root"
    (found / "a").mkdir(parents=True)
    (found / "link").symlink_to("..")
    (found / "a" / "link").symlink_to("../a")
    return found


@given(names, kinds, names)
def test_what_pythons_own_filter_lets_out_is_refused_here_too(root: Path, name: str, kind: bytes, target: str) -> None:
    member = member_of(name, kind, target)
    try:
        check_within(member, str(root))
    except OSError:
        return
    # It may be laxer than this (it takes the slash off an absolute name), and never stricter.
    tarfile.data_filter(member, str(root))


def test_members_that_stay_are_unpacked_and_nothing_else_is(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as made:
        for name, kind, target in (
            ("./inner", tarfile.DIRTYPE, ""),
            ("./good", tarfile.SYMTYPE, "inner/file"),
            ("./out", tarfile.SYMTYPE, "../.."),
            ("./out/file", tarfile.REGTYPE, ""),
            ("/absolute", tarfile.REGTYPE, ""),
            ("../above", tarfile.REGTYPE, ""),
            ("./hard", tarfile.LNKTYPE, "../secret"),
            ("./pipe", tarfile.FIFOTYPE, ""),
        ):
            made.addfile(member_of(name, kind, target))
        content = tarfile.TarInfo("./inner/file")
        content.size, content.mode = 4, 0o4000
        made.addfile(content, io.BytesIO(b"text"))
    (tmp_path / "secret").write_text("kept")
    _unpack(archive.getvalue(), tmp_path / "got")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["got", "secret"]
    assert (tmp_path / "got" / "good").read_text() == "text"
    assert oct((tmp_path / "got" / "inner" / "file").stat().st_mode & 0o7777) == oct(0o600)
    # The name of a link that was refused is a directory's now, which is within.
    found = {path.name for path in (tmp_path / "got").iterdir()}
    assert found == {"inner", "good", "out"}
    assert not (tmp_path / "got" / "out").is_symlink()
