"""Layers are unpacked as their archives say, as overlayfs wants it, and never outside of their directory."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.images.compression import pieces
from kuberoll_workers.sandboxes.images.errors import ImageError, ImageInvalid, NoSpace
from kuberoll_workers.sandboxes.images.layers import Ids, Limits, Unpacked, empty, unpack
from tests.examples import examples
from tests.sandboxes.images.archives import (
    DEVICE,
    DIRECTORY,
    FIFO,
    FILE,
    HARD_LINK,
    SYMLINK,
    compressed,
    entry,
    tar,
)
from tests.sandboxes.images.trees import tree_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has all capabilities outside of a namespace")

IDS = Ids(((0, 65536),), ((0, 65536),))
LIMITS = Limits(reserve=0)
WHITEOUT = ("character", "0o0")


def unpacked(
    plain: bytes, directory: Path, lowers: Sequence[Path] = (), limits: Limits = LIMITS, ids: Ids = IDS
) -> Unpacked:
    """Unpack with all rights of root, outside of any namespace: nothing else holds an archive back."""
    directory.mkdir(exist_ok=True)
    opened = [os.open(path, os.O_RDONLY) for path in (directory, *lowers)]
    try:
        return unpack(pieces(io.BytesIO(plain).read), opened[0], ids=ids, lowers=opened[1:], limits=limits)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def kinds(directory: Path) -> dict[str, tuple[str, str]]:
    return {name: (one["kind"], one["mode"]) for name, one in tree_of(str(directory)).items()}


def opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, "user.overlay.opaque") == b"y"
    except OSError:
        return False


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("how", ["plain", "gzip", "zstd"])
def test_all_kinds_of_entries(tmp_path: Path, how: str, form: int) -> None:
    long = "/".join(["d" * 90] * 4)
    members = [
        entry("./", DIRECTORY, mode=0o751, uid=5),
        entry("bin/", DIRECTORY, mode=0o2755, gid=7, mtime=1000),
        entry("bin/su", FILE, b"x" * 3_000_000, mode=0o4755, uid=1, gid=2, mtime=1_600_000_000),
        entry("bin/none", FILE, mode=0o000, uid=65535),
        entry("bin/hard", HARD_LINK, link="bin/su"),
        entry("link", SYMLINK, link="../../etc/passwd", uid=3),
        entry("fifo", FIFO, mode=0o622),
        entry(f"{long}/file", FILE, b"long"),
        entry("closed/", DIRECTORY, mode=0o000),
        entry("closed/inside", FILE, b"inside"),
        entry("stra\u00dfe", FILE, b"name"),
        entry("bytes-\udcff", FILE, b"name"),
        entry("deep", SYMLINK, link="x" * 300),
        entry("tmp", DIRECTORY, mode=0o1777),
    ]
    made = unpacked(compressed(tar(members, form), how), tmp_path / "layer")
    tree = tree_of(str(tmp_path / "layer"))
    assert (made.entries, made.devices, made.strangers, made.dropped) == (len(members), 0, 0, 0)
    assert made.size == 3_000_000 + 4 + 6 + 8
    assert made.implied == 4
    assert kinds(tmp_path / "layer")["bin"] == ("directory", "0o2755")
    su = tree["bin/su"]
    assert (su["mode"], su["uid"], su["gid"], su["mtime"]) == ("0o4755", 1, 2, 1_600_000_000 * 10**9)
    assert tree["bin/hard"] == su
    assert tree["bin/none"]["uid"] == 65535
    assert tree["link"]["target"] == "../../etc/passwd"
    assert (tree["fifo"]["kind"], tree["fifo"]["mode"]) == ("fifo", "0o622")
    assert tree[f"{long}/file"]["size"] == 4
    assert tree["closed"]["mode"] == "0o0"
    assert {"closed/inside", "stra\u00dfe", "bytes-\udcff"} <= tree.keys()
    assert len(tree["deep"]["target"]) == 300
    assert tree["tmp"]["mode"] == "0o1777"
    root = (tmp_path / "layer").stat()
    assert (stat.S_IMODE(root.st_mode), root.st_uid) == (0o751, 5)
    assert (tmp_path / "layer/bin").stat().st_mtime == 1000


def test_whiteouts_are_those_of_overlayfs(tmp_path: Path) -> None:
    members = [
        entry("a/", DIRECTORY),
        entry("a/.wh.gone", FILE),
        entry("a/.wh..wh..opq", FILE),
        entry("b/.wh.file", FILE),
        # What is in the same layer stays, and hides what is below.
        entry("c/", DIRECTORY),
        entry("c/kept", FILE, b"kept"),
        entry(".wh.c", FILE),
        entry(".wh.d", FILE),
        entry("d/new", FILE, b"new"),
        entry(".wh.e", FILE),
        entry("e", FILE, b"new"),
        entry(".wh.f", FILE),
        entry("f", DIRECTORY),
        # Of AUFS.
        entry(".wh..wh.aufs", FILE, b"x" * 3_000_000),
        entry(".wh..wh.plnk/1.2", FILE),
    ]
    below = tmp_path / "below"
    unpacked(tar([entry("b/file", FILE), entry("a/gone", FILE)]), below)
    made = unpacked(tar(members), tmp_path / "layer", [below])
    assert made.whiteouts == 6
    tree = kinds(tmp_path / "layer")
    # In an opaque directory nothing else is to be hidden.
    assert {name for name, one in tree.items() if one == WHITEOUT} == {"b/file"}
    assert tree.keys() == {"a", "b", "b/file", "c", "c/kept", "d", "d/new", "e", "f"}
    assert {name for name in "abcdf" if opaque(tmp_path / "layer" / name)} == set("acdf")


def test_whiteouts_of_nothing_are_left_out(tmp_path: Path) -> None:
    # overlayfs lists their names where there is nothing to merge.
    below, layer = tmp_path / "below", tmp_path / "layer"
    unpacked(tar([entry("d/f", FILE), entry("o/s/f", FILE)]), below)
    plain = tar(
        [
            entry("d/.wh.other"),
            entry("new/.wh.f"),
            entry("o/.wh..wh..opq"),
            entry("o/s/.wh.f"),
            entry(".wh.x"),
            entry("gone/f"),
            entry("gone/.wh.g"),
            entry("gone", FILE),
        ]
    )
    unpacked(plain, layer, [below])
    assert {name for name, one in kinds(layer).items() if one == WHITEOUT} == {"x", "d/other"}
    unpacked(plain, tmp_path / "alone")
    assert WHITEOUT not in kinds(tmp_path / "alone").values()


def test_later_entries_count(tmp_path: Path) -> None:
    members = [
        entry("file", FILE, b"first"),
        entry("file", FILE, b"second", mode=0o600),
        entry("hard", HARD_LINK, link="file"),
        entry("file", FILE, b"third"),
        entry("dir/", DIRECTORY, mode=0o700),
        entry("dir/inner/deep/file", FILE, b"inner"),
        entry("dir", FILE, b"now a file"),
        entry("link", SYMLINK, link="/nowhere"),
        entry("link/", DIRECTORY, mode=0o711),
        entry("again/", DIRECTORY, mode=0o700),
        entry("again/file", FILE),
        entry("again/", DIRECTORY, mode=0o755),
        entry("file2", FILE, b"x"),
        entry("file2", SYMLINK, link="y"),
        entry("self", FILE, b"self"),
        entry("self", HARD_LINK, link="./self"),
        entry("null", FILE, b"was a file"),
        entry("null", DEVICE),
    ]
    made = unpacked(tar(members), tmp_path / "layer")
    layer = tmp_path / "layer"
    assert ((layer / "file").read_bytes(), (layer / "hard").read_bytes()) == (b"third", b"second")
    assert (layer / "dir").read_bytes() == b"now a file"
    assert kinds(layer)["link"] == ("directory", "0o711")
    assert opaque(layer / "link")
    assert kinds(layer)["again"] == ("directory", "0o755")
    assert (layer / "again/file").exists()
    assert (layer / "file2").is_symlink()
    assert (layer / "self").read_bytes() == b"self"
    assert not (layer / "null").exists()
    assert (made.devices, made.implied) == (1, 0)


def test_symbolic_links_are_followed_inside(tmp_path: Path) -> None:
    members = [
        entry("usr/bin/", DIRECTORY),
        entry("bin", SYMLINK, link="usr/bin"),
        entry("bin/sh", FILE, b"sh"),
        entry("up", SYMLINK, link="../../../../usr"),
        entry("up/bin/ls", FILE, b"ls"),
        entry("root", SYMLINK, link="/"),
        entry("root/root/etc/passwd", FILE, b"theirs"),
        entry("hard", HARD_LINK, link="up/bin/ls"),
        entry("twice", SYMLINK, link="bin/../../usr/./bin"),
        entry("twice/cp", FILE, b"cp"),
    ]
    unpacked(tar(members), tmp_path / "layer")
    tree = kinds(tmp_path / "layer")
    assert {"usr/bin/sh", "usr/bin/ls", "etc/passwd", "hard", "usr/bin/cp"} <= tree.keys()
    assert not any(name.startswith(("up/", "root/", "bin/")) for name in tree)


def test_directories_that_are_not_in_the_archive_are_as_below(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    unpacked(tar([entry("tmp/", DIRECTORY, mode=0o1777, uid=1), entry("a/b/", DIRECTORY, mode=0o700, gid=9)]), first)
    unpacked(tar([entry(".wh.a", FILE), entry("x/", DIRECTORY), entry("x/.wh..wh..opq", FILE)]), second, [first])
    layer = tmp_path / "layer"
    made = unpacked(tar([entry("tmp/file"), entry("a/b/file"), entry("x/file")]), layer, [first, second])
    tree = tree_of(str(layer))
    assert made.implied == 4
    assert (tree["tmp"]["mode"], tree["tmp"]["uid"]) == ("0o1777", 1)
    # What a layer between has removed, is not there.
    assert (tree["a/b"]["mode"], tree["a/b"]["gid"]) == ("0o755", 0)
    below = tmp_path / "below"
    made = unpacked(tar([entry("a/b/file"), entry("a/", DIRECTORY, mode=0o710)]), below, [first])
    assert made.implied == 1
    assert (kinds(below)["a/b"], kinds(below)["a"]) == (("directory", "0o700"), ("directory", "0o710"))


def test_owners_that_a_machine_does_not_have(tmp_path: Path) -> None:
    plain = tar([entry("a", uid=1000), entry("b", uid=70_000, gid=4_000_000_000), entry("c")])
    made = unpacked(plain, tmp_path / "range")
    tree = tree_of(str(tmp_path / "range"))
    assert [(tree[name]["uid"], tree[name]["gid"]) for name in "abc"] == [(1000, 0), (65534, 65534), (0, 0)]
    assert made.strangers == 1
    made = unpacked(plain, tmp_path / "single", ids=Ids(((0, 1),), ((0, 1),)))
    tree = tree_of(str(tmp_path / "single"))
    assert {(tree[name]["uid"], tree[name]["gid"]) for name in "abc"} == {(0, 0)}
    assert made.strangers == 2


def test_extended_attributes(tmp_path: Path) -> None:
    capability = bytes.fromhex("0100000202200000000000000000000000000000")
    pax = {
        "SCHILY.xattr.user.note": "\udcff\0bytes\n",
        "SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape"),
        "SCHILY.xattr.user.overlay.redirect": "/etc",
        "SCHILY.xattr.trusted.overlay.redirect": "/etc",
        "SCHILY.xattr.security.selinux": "x",
    }
    made = unpacked(tar([entry("file", FILE, b"x", pax=pax), entry("dir/", DIRECTORY, pax=pax)]), tmp_path / "layer")
    found = {name: os.getxattr(tmp_path / "layer/file", name) for name in os.listxattr(tmp_path / "layer/file")}
    assert found == {"user.note": b"\xff\0bytes\n", "security.capability": capability}
    assert os.getxattr(tmp_path / "layer/dir", "user.note") == b"\xff\0bytes\n"
    assert made.dropped == 6


def test_times_to_the_nanosecond(tmp_path: Path) -> None:
    members = [
        entry("a", pax={"mtime": "1600000000.123456789"}),
        entry("b", pax={"mtime": "99999999999999999999"}),
        entry("c", pax={"mtime": "-1.5"}),
    ]
    unpacked(tar(members), tmp_path / "layer")
    tree = tree_of(str(tmp_path / "layer"))
    assert (tree["a"]["mtime"], tree["c"]["mtime"]) == (1_600_000_000_123_456_789, -1_500_000_000)


def sparse(form: str, blocks: Sequence[tuple[int, bytes]], size: int) -> bytes:
    """A tar with a file with holes, as GNU tar writes it."""
    stored = b"".join(content for _, content in blocks)
    regions = ",".join(f"{at},{len(content)}" for at, content in blocks)
    pax = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "holes", "GNU.sparse.size": str(size)}
    if form == "0.1":
        pax |= {"GNU.sparse.map": regions}
        return tar([entry("GNUSparseFile/holes", FILE, stored, pax=pax)])
    text = "\n".join([str(len(blocks)), *regions.split(",")]) + "\n"
    head = text.encode() + bytes(-len(text) % 512)
    pax = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "holes",
        "GNU.sparse.realsize": str(size),
    }
    return tar([entry("GNUSparseFile/holes", FILE, head + stored, pax=pax)])


@pytest.mark.parametrize("form", ["0.1", "1.0"])
def test_files_with_holes(tmp_path: Path, form: str) -> None:
    blocks = [(0, b"a" * 512), (1 << 20, b"b" * 1024)]
    made = unpacked(sparse(form, blocks, 64 << 20), tmp_path / "layer")
    path = tmp_path / "layer/holes"
    assert path.stat().st_size == 64 << 20
    assert path.stat().st_blocks * 512 < 1 << 20
    assert made.size == 1536
    with path.open("rb") as file:
        file.seek(1 << 20)
        assert file.read(1025) == b"b" * 1024 + b"\0"


def test_gnu_tar_writes_what_is_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "dir").mkdir(parents=True)
    with (source / "holes").open("wb") as file:
        file.write(b"x" * 4096)
        file.seek(8 << 20)
        file.write(b"y" * 4096)
    (source / ("n" * 200)).write_text("name")
    (source / "dir" / "link").symlink_to("../" + "t" * 180)
    os.link(source / "holes", source / "dir" / "hard")
    for number, options in enumerate(["--format=gnu -S", "--format=posix -S", "--format=oldgnu -S"]):
        path = tmp_path / "made.tar"
        assert os.system(f"tar -C {source} {options} --ignore-failed-read -cf {path} . 2>/dev/null") in (0, 512)
        unpacked(path.read_bytes(), tmp_path / str(number))
        expected, found = tree_of(str(source)), tree_of(str(tmp_path / str(number)))
        for tree in (expected, found):
            for one in tree.values():
                one["mtime"] = one.get("mtime", 0) // 10**9
        assert found == expected, options


# Hostile archives.


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside that of the layer, with what an archive might be after."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    (tmp_path / "outside/dir").mkdir()
    (tmp_path / "outside/dir/file").write_text("file")
    return tmp_path / "outside"


ATTACKS = {
    "dots": ([entry("../outside/new")], "leads out"),
    "dots within": ([entry("a/../../outside/new")], "leads out"),
    "absolute": ([entry("{outside}/secret", FILE, b"theirs")], None),
    "link up": ([entry("l", SYMLINK, link="../outside"), entry("l/secret", FILE, b"theirs")], None),
    "link absolute": ([entry("l", SYMLINK, link="{outside}"), entry("l/secret", FILE, b"theirs")], None),
    "link to a file": ([entry("l", SYMLINK, link="{outside}/secret"), entry("l", FILE, b"theirs")], None),
    "links that meet": (
        [entry("a", SYMLINK, link="b"), entry("b", SYMLINK, link="a"), entry("a/x")],
        "symbolic links",
    ),
    "link then directory": (
        [entry("l", SYMLINK, link="{outside}/dir"), entry("l/", DIRECTORY, mode=0o777), entry("l/x", FILE)],
        None,
    ),
    "directory then link": (
        [entry("d/", DIRECTORY), entry("d/x"), entry("d", SYMLINK, link="{outside}"), entry("d/secret", FILE, b"t")],
        None,
    ),
    "hard link up": ([entry("h", HARD_LINK, link="../outside/secret")], "leads out"),
    "hard link absolute": ([entry("h", HARD_LINK, link="{outside}/secret")], "no file of this layer"),
    "hard link by a link": (
        [entry("l", SYMLINK, link="{outside}"), entry("h", HARD_LINK, link="l/secret"), entry("h", FILE, b"theirs")],
        "no file of this layer",
    ),
    "hard link to a link": (
        [entry("l", SYMLINK, link="{outside}/secret"), entry("h", HARD_LINK, link="l"), entry("h", FILE, b"theirs")],
        None,
    ),
    "hard link to a directory": ([entry("d/", DIRECTORY), entry("h", HARD_LINK, link="d")], "no file"),
    "hard link to the root": ([entry("h", HARD_LINK, link="/")], "directory"),
    "whiteout of the parent": ([entry("a/.wh...", FILE)], "whiteout of nothing"),
    "whiteout of itself": ([entry("a/.wh..", FILE)], "whiteout of nothing"),
    "whiteout by a link": ([entry("l", SYMLINK, link="{outside}"), entry("l/.wh.secret", FILE)], None),
    "opaque by a link": ([entry("l", SYMLINK, link="{outside}"), entry("l/.wh..wh..opq", FILE)], None),
    "root as a file": ([entry("./", FILE, b"x")], "root is no directory"),
    "root as a link": ([entry(".", SYMLINK, link="{outside}")], "root is no directory"),
    "removed by a link": (
        [entry("l", SYMLINK, link="{outside}"), entry("l/dir", FILE, b"theirs"), entry("l", FILE)],
        None,
    ),
    "mode by a link": ([entry("l", SYMLINK, link="{outside}/secret", mode=0o777, uid=9)], None),
    "a file as a directory": ([entry("f", FILE), entry("f/x", FILE)], "no directory"),
    "a fifo as a directory": ([entry("f", FIFO), entry("f/x", FILE)], "no directory"),
    "a zero in a name": ([entry("f", FILE, pax={"path": "a\0b"})], "zero byte"),
    "a zero in a link": ([entry("f", SYMLINK, link="x", pax={"linkpath": "a\0b"})], "zero byte"),
    "a link to nothing": ([entry("f", SYMLINK, link="")], "No such file"),
    "a long name": ([entry("f" * 300, FILE)], "File name too long"),
    "a long path": ([entry("f/" * 3000, FILE)], "at most 4096"),
    "a device": ([entry("null", DEVICE), entry("null", FILE, b"x")], None),
    "another kind": ([entry("v", b"V")], "unknown"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(tmp_path: Path, outside: Path, name: str) -> None:
    members, refused = ATTACKS[name]
    before = tree_of(str(tmp_path))
    for info, _ in members:
        info.name = info.name.replace("{outside}", str(outside))
        info.linkname = info.linkname.replace("{outside}", str(outside))
    plain = tar(members)
    if refused:
        with pytest.raises(ImageInvalid, match=refused):
            unpacked(plain, tmp_path / "layer")
    else:
        unpacked(plain, tmp_path / "layer")
    after = {path: one for path, one in tree_of(str(tmp_path)).items() if not path.startswith("layer")}
    assert after == before
    # What is left of it goes, too, and nothing else.
    empty_at(tmp_path / "layer")
    assert not any((tmp_path / "layer").iterdir())
    after = {path: one for path, one in tree_of(str(tmp_path)).items() if path != "layer"}
    assert after == before


def empty_at(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        empty(descriptor)
    finally:
        os.close(descriptor)


NAMES = ["a", "b", "a/b", "b/a", "a/b/c", "l", "l/a", "l/b/c", "d/l", "d/l/x", ".", "./a", "a/../b", ".wh.a", "l/.wh.a",
         "a/.wh..wh..opq", ".wh..wh..opq", "d/.wh.l", "{outside}/secret", "{outside}/dir/file", "l/secret", "l/dir",
         "l/dir/file", "../outside/secret", "a/../../outside/x"]  # fmt: skip
TARGETS = ["a", "b", "/", ".", "..", "../outside", "../../outside", "{outside}", "{outside}/secret", "{outside}/dir",
           "l", "l/secret", "a/b", "d/l", "../l", "b/../.."]  # fmt: skip

hostile = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from([FILE, FILE, DIRECTORY, SYMLINK, SYMLINK, HARD_LINK, FIFO, DEVICE]),
        st.sampled_from(TARGETS),
        st.sampled_from([0o644, 0o4777, 0o000, 0o1777]),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=examples(600))
@given(hostile)
def test_nothing_is_changed_outside(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes, str, int]]
) -> None:
    place = tmp_path_factory.mktemp("hostile")
    outside = place / "outside"
    (outside / "dir").mkdir(parents=True)
    (outside / "secret").write_text("secret")
    (outside / "dir/file").write_text("file")
    before = tree_of(str(place)), outside.stat(), place.stat().st_mtime_ns
    plain = tar(
        entry(
            name.replace("{outside}", str(outside)),
            kind,
            b"theirs" if kind == FILE else b"",
            link=link.replace("{outside}", str(outside)),
            mode=mode,
            uid=9,
        )
        for name, kind, link, mode in members
    )
    layer = place / "layer"
    layer.mkdir()
    began = place.stat().st_mtime_ns
    with contextlib.suppress(ImageInvalid):
        unpacked(plain, layer)
    found = tree_of(str(place))
    assert {path: one for path, one in found.items() if path.split("/")[0] != "layer"} == before[0]
    assert (outside.stat().st_mode, outside.stat().st_mtime_ns) == (before[1].st_mode, before[1].st_mtime_ns)
    assert place.stat().st_mtime_ns == began
    assert not [one for one in found.values() if one["kind"] == "character" and one["mode"] != "0o0"]
    empty_at(layer)
    assert not any(layer.iterdir())
    assert {path: one for path, one in tree_of(str(place)).items() if path.split("/")[0] != "layer"} == before[0]


@settings(max_examples=examples(300))
@given(st.randoms(use_true_random=False), st.sampled_from(["plain", "gzip", "zstd"]), st.integers(1, 8))
def test_damaged_archives_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, chance: random.Random, how: str, count: int
) -> None:
    members = [
        entry("d/", DIRECTORY),
        entry("d/" + "n" * 120, FILE, b"c" * 700, pax={"mtime": "1.5", "SCHILY.xattr.user.x": "y"}),
        entry("l", SYMLINK, link="t" * 120),
        entry("h", HARD_LINK, link="d/" + "n" * 120),
    ]
    data = bytearray(compressed(tar(members, chance.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])), how))
    for _ in range(count):
        if data and chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        elif data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    place = tmp_path_factory.mktemp("damaged")
    with contextlib.suppress(ImageError):
        unpacked(bytes(data), place / "layer")
    assert [path.name for path in place.iterdir()] == ["layer"]
    empty_at(place / "layer")
    assert not any((place / "layer").iterdir())


def test_a_tar_ends_where_it_ends(tmp_path: Path) -> None:
    plain = tar([entry("a", FILE, b"x" * 600)])
    assert unpacked(b"", tmp_path / "0").entries == 0
    assert unpacked(bytes(1024), tmp_path / "1").entries == 0
    assert unpacked(plain + bytes(5000), tmp_path / "2").entries == 1
    assert unpacked(plain[:1536], tmp_path / "3").entries == 1
    for cut in (200, 700, 1400):
        with pytest.raises(ImageInvalid, match=r"damaged|cut off"):
            unpacked(plain[:cut], tmp_path / "4")
    with pytest.raises(ImageInvalid, match="damaged"):
        unpacked(plain[:1536] + b"x" * 512 + bytes(1024), tmp_path / "5")


def test_limits(tmp_path: Path) -> None:
    many = tar(entry(f"f{i}") for i in range(20))
    with pytest.raises(ImageInvalid, match="more than 10 entries"):
        unpacked(many, tmp_path / "many", limits=Limits(entries=10, reserve=0))
    with pytest.raises(NoSpace, match="stay free"):
        unpacked(tar([entry("f", FILE, b"x")]), tmp_path / "full", limits=Limits(reserve=1 << 60))
    header = tar([entry("f", pax={"comment": "x" * (2 << 20)})])
    with pytest.raises(ImageInvalid, match="a header of"):
        unpacked(header, tmp_path / "header")
    with pytest.raises(ImageInvalid, match=r"File too large|Invalid argument"):
        unpacked(sparse("0.1", [(0, b"")], 1 << 62), tmp_path / "huge")
    with pytest.raises(ImageInvalid, match="map of holes"):
        unpacked(sparse("0.1", [(512, b"a" * 512), (0, b"a" * 512)], 4096), tmp_path / "backwards")
    with pytest.raises(ImageInvalid, match="wrong"):
        unpacked(sparse("0.1", [(0, b"a" * 512)] * 1, 100), tmp_path / "small")


def test_what_stands_for_gigabytes_is_kept_in_bounds() -> None:
    data = compressed(bytes(256 << 20), "gzip")
    assert len(data) < 2 << 20
    sizes = [len(piece) for piece in pieces(io.BytesIO(data).read)]
    assert (sum(sizes), max(sizes)) == (256 << 20, 1 << 20)


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_members_follow_each_other(how: str) -> None:
    first, second = compressed(b"first", how), compressed(b"second", how)
    assert b"".join(pieces(io.BytesIO(first + second + bytes(700)).read)) == b"firstsecond"
    with pytest.raises(ImageInvalid, match="cut off"):
        list(pieces(io.BytesIO(first[:-3]).read))
    with pytest.raises(ImageInvalid, match="damaged"):
        list(pieces(io.BytesIO(first + b"rubbish that is longer than a header").read))


@settings(max_examples=examples(100))
@given(st.lists(st.binary(max_size=5000), max_size=4), st.sampled_from(["plain", "gzip", "zstd"]), st.integers(1, 50))
def test_pieces_are_the_whole(parts: list[bytes], how: str, step: int) -> None:
    # So that none begins as if it were compressed.
    parts = [b"plain", *parts]
    data = io.BytesIO(b"".join(compressed(part, how) for part in parts))
    assert b"".join(pieces(lambda count: data.read(min(count, max(6, step))))) == b"".join(parts)


def test_other_compressions_are_named() -> None:
    with pytest.raises(ImageInvalid, match="bzip2"):
        list(pieces(io.BytesIO(b"BZh91AY").read))


@pytest.mark.slow
def test_a_deep_tree_is_made_and_removed(tmp_path: Path) -> None:
    path = "/".join(["d"] * 2000)
    unpacked(tar([entry(f"{path}/f", FILE, b"x"), entry("d/d/d", FILE, b"now a file")]), tmp_path / "layer")
    assert (tmp_path / "layer/d/d/d").read_bytes() == b"now a file"
    unpacked(tar([entry(f"{path}/f", FILE, b"x")]), tmp_path / "other")
    empty_at(tmp_path / "other")
    assert not any((tmp_path / "other").iterdir())


@pytest.fixture
def alarms() -> Iterator[None]:
    yield
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_no_alarm_is_left(tmp_path: Path, alarms: None) -> None:
    unpacked(tar([entry("a")]), tmp_path / "good")
    with pytest.raises(ImageInvalid):
        unpacked(b"x" * 2000, tmp_path / "bad")
