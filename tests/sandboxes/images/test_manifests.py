"""Manifests, lists of them, and configurations: chosen by platform, checked before they are used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.images.errors import DigestMismatch, ImageError, ImageInvalid, PlatformMissing
from kuberoll_workers.sandboxes.images.manifests import (
    Config,
    Platform,
    checked,
    choose,
    digest_of,
    is_index,
    parse_config,
    parse_index,
    parse_manifest,
)

AMD, ARM = Platform("amd64"), Platform("arm64", "v8")

json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "layers",
                    "manifests",
                    "config",
                    "digest",
                    "size",
                    "mediaType",
                    "platform",
                    "rootfs",
                    "diff_ids",
                    "Env",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


def listed(*platforms: dict[str, str] | None) -> bytes:
    return json.dumps(
        {
            "schemaVersion": 2,
            "manifests": [
                {"digest": f"sha256:{i:064x}", "size": 1, **({"platform": one} if one else {})}
                for i, one in enumerate(platforms)
            ],
        }
    ).encode()


def chosen(content: bytes, platform: Platform) -> int:
    return int(choose(parse_index(content, "x"), platform, "x").digest[7:], 16)


def test_the_platform_decides() -> None:
    content = listed(
        {"os": "unknown", "architecture": "unknown"},
        {"os": "windows", "architecture": "amd64"},
        {"os": "linux", "architecture": "arm64", "variant": "v8"},
        {"os": "linux", "architecture": "arm", "variant": "v6"},
        {"os": "linux", "architecture": "arm", "variant": "v7"},
        {"os": "linux", "architecture": "amd64"},
        {"os": "linux", "architecture": "amd64", "variant": "v3"},
    )
    assert is_index(content, "", "x")
    assert chosen(content, AMD) == 5
    assert chosen(content, ARM) == 2
    assert chosen(content, Platform("arm", "v7")) == 4
    assert chosen(content, Platform("arm", "v6")) == 3
    with pytest.raises(PlatformMissing, match="linux/s390x; there are windows/amd64, linux/arm64/v8"):
        chosen(content, Platform("s390x"))
    assert chosen(listed({"os": "linux", "architecture": "arm64"}), ARM) == 0
    assert chosen(listed(None), AMD) == 0


def test_what_is_no_image_is_refused() -> None:
    layer = {"digest": digest_of(b""), "size": 0, "mediaType": "application/vnd.in-toto+json"}
    with pytest.raises(ImageInvalid, match="in-toto"):
        parse_manifest(json.dumps({"config": layer, "layers": []}).encode(), "x")
    with pytest.raises(ImageInvalid, match="schema 1"):
        is_index(b'{"schemaVersion": 1}', "", "x")
    with pytest.raises(ImageInvalid, match="text/html"):
        is_index(b"{}", "text/html; charset=utf-8", "x")
    with pytest.raises(ImageInvalid, match="not JSON"):
        is_index(b"<html>", "text/html", "x")
    bad = {"digest": "md5:abc", "size": 0}
    with pytest.raises(ImageInvalid, match=r"layers\[0\]: 'md5:abc'"):
        parse_manifest(json.dumps({"config": layer | {"mediaType": ""}, "layers": [bad]}).encode(), "x")
    with pytest.raises(DigestMismatch, match="was asked for"):
        checked(b"a", digest_of(b"b"), "x")


def config(**value: Any) -> Config:
    return parse_config(json.dumps(value).encode(), "x", AMD)


def test_what_a_configuration_says() -> None:
    found = config(
        architecture="amd64",
        config={"Env": ["A=1=2", "broken", "B="], "User": "1:2", "Entrypoint": ["/e"], "Cmd": None, "WorkingDir": ""},
        rootfs={"diff_ids": [digest_of(b"")]},
    )
    assert found.environment == {"A": "1=2", "B": ""}
    assert (found.user, found.entrypoint, found.command, found.workdir) == ("1:2", ("/e",), (), "/")
    assert config().diff_ids == ()
    with pytest.raises(PlatformMissing, match="linux/arm64, not linux/amd64"):
        config(architecture="arm64")
    with pytest.raises(ImageInvalid, match="no digest of a layer"):
        config(rootfs={"diff_ids": ["../../etc"]})
    with pytest.raises(ImageInvalid, match="list of words"):
        config(config={"Cmd": "sh"})


@given(json_values)
def test_any_json_is_read_or_refused(value: Any) -> None:
    content = json.dumps(value).encode()
    refused = 0
    for read in (
        lambda: is_index(content, "", "x"),
        lambda: choose(parse_index(content, "x"), AMD, "x"),
        lambda: parse_manifest(content, "x"),
        lambda: parse_config(content, "x", AMD),
    ):
        try:
            read()
        except ImageError:
            refused += 1
    # Nothing is a list of manifests and a manifest at once, with contents by digest.
    assert refused
