"""References of images: completed as Docker does, written back as they were read, and refused with how to mend them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.images.errors import ReferenceInvalid
from kuberoll_workers.sandboxes.images.references import (
    ArchiveReference,
    LayoutReference,
    RegistryReference,
    complete,
    parse,
)

SHA = "sha256:" + "a" * 64

words = st.from_regex(r"[a-z0-9]+((\.|_|__|-{1,3})[a-z0-9]+){0,2}", fullmatch=True).filter(lambda text: len(text) < 40)
labels = st.from_regex(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,6}[a-zA-Z0-9])?", fullmatch=True)
dotted = st.lists(labels, min_size=2, max_size=3).map(".".join)
hosts = st.one_of(
    dotted, dotted.map("{}:5000".format), st.sampled_from(["localhost", "localhost:80", "[::1]:5000", "registry:5000"])
)
tags = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
digests = st.one_of(st.none(), st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True))


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:12", "docker.io/library/debian:12"),
        ("bitnami/redis", "docker.io/bitnami/redis:latest"),
        ("index.docker.io/debian", "docker.io/library/debian:latest"),
        ("docker.io/debian", "docker.io/library/debian:latest"),
        ("localhost/mine", "localhost/mine:latest"),
        ("localhost:5000/a/b:c", "localhost:5000/a/b:c"),
        ("Registry/mine", "Registry/mine:latest"),
        ("ghcr.io/o/r:v1", "ghcr.io/o/r:v1"),
        (f"debian@{SHA}", f"docker.io/library/debian@{SHA}"),
        (f"r.example/a:1@{SHA}", f"r.example/a:1@{SHA}"),
        ("[::1]:5000/a", "[::1]:5000/a:latest"),
        ("dir:path", "docker.io/library/dir:path"),
    ],
)
def test_names_are_completed_as_docker_does(text: str, whole: str) -> None:
    assert complete(text) == whole
    assert str(parse(text)) == whole


@given(hosts, st.lists(words, min_size=1, max_size=3), tags, digests)
def test_what_is_whole_is_read_as_it_is(host: str, parts: list[str], tag: str, digest: str | None) -> None:
    text = f"{host}/{'/'.join(parts)}:{tag}" + (f"@{digest}" if digest else "")
    found = parse(text)
    assert found == RegistryReference(host, "/".join(parts), tag, digest)
    assert str(found) == text
    assert parse(str(found)) == found


@given(st.lists(words, min_size=1, max_size=3), st.one_of(st.none(), tags), digests)
def test_a_name_and_what_it_is_completed_to_are_the_same(parts: list[str], tag: str | None, digest: str | None) -> None:
    # With a dot it is a host, which has no underscores.
    assume("." not in parts[0])
    text = "/".join(parts) + (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")
    found = parse(text)
    assert parse(str(found)) == found
    assert isinstance(found, RegistryReference)
    assert (found.tag or found.digest) is not None


@given(st.text(max_size=60))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except ReferenceInvalid:
        return
    assert parse(str(found)) == found


@given(st.text("abcAB:/@.-_", max_size=30))
def test_texts_of_the_grammars_characters_too(text: str) -> None:
    try:
        found = parse(text)
    except ReferenceInvalid:
        return
    assert parse(str(found)) == found
    if isinstance(found, RegistryReference):
        assert re.fullmatch(r"[a-zA-Z0-9.:\[\]-]+", found.host)
        assert ".." not in found.repository


def test_paths_are_made_absolute_and_names_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("oci:images") == LayoutReference(tmp_path / "images")
    assert parse("oci:/images:docker.io/library/a:b") == LayoutReference(Path("/images"), "docker.io/library/a:b")
    assert parse("docker-archive:a.tar") == ArchiveReference(tmp_path / "a.tar")
    assert parse("docker-archive:/a.tar:busybox") == ArchiveReference(
        Path("/a.tar"), "docker.io/library/busybox:latest"
    )
    assert str(parse("docker-archive:/a.tar:b:c")) == "docker-archive:/a.tar:docker.io/library/b:c"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "debian:12"),
        (" debian", "spaces"),
        ("Debian", "write 'debian'"),
        ("docker://debian", "write 'debian'"),
        ("https://ghcr.io/a/b", "write 'ghcr.io/a/b'"),
        ("docker-daemon:a:b", "oci:DIRECTORY"),
        ("oci:", "oci:DIRECTORY[:TAG]"),
        ("docker-archive::name", "docker-archive:FILE[:NAME]"),
        ("debian@sha256:abc", "64 hexadecimal digits"),
        (f"debian@{SHA.upper()}", "lower case"),
        ("debian:-", "no tag"),
        ("a" * 64, "an id names no image"),
        ("a/../b", "'..'"),
        ("a//b", "no part of a name"),
        ("-x.example/a", "no registry"),
        ("x.example/" + "a" * 250, "255"),
    ],
)
def test_refusals_say_how_to_mend(text: str, hint: str) -> None:
    with pytest.raises(ReferenceInvalid, match=re.escape(hint)):
        parse(text)
