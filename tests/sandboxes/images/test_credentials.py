"""Credentials as `docker login` writes them; what is not read is named with the way out."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.images.credentials import credentials_for, file_of, read

AUTH = base64.b64encode(b"me:pass:word").decode()


def found(host: str, **value: Any) -> tuple[str | None, str]:
    one = read(json.dumps(value), "config.json", host)
    return one.basic, one.missing


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("docker.io", "https://index.docker.io/v1/"),
        ("r.example:5000", "r.example:5000"),
        ("r.example", "https://r.example"),
        ("r.example", "https://r.example/v2/"),
    ],
)
def test_they_are_found_by_the_registrys_name(host: str, key: str) -> None:
    assert found(host, auths={key: {"auth": AUTH}}) == (AUTH, "")
    assert found("other.example", auths={key: {"auth": AUTH}})[0] is None


def test_what_is_in_the_file_counts_before_programs() -> None:
    assert found("r.example", auths={"r.example": {"auth": AUTH}}, credsStore="desktop") == (AUTH, "")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ({"credHelpers": {"r.example": "ecr-login"}}, "docker-credential-ecr-login"),
        ({"credsStore": "desktop", "auths": {"r.example": {}}}, "DOCKER_CONFIG"),
        ({"auths": {"r.example": {"auth": AUTH, "identitytoken": "x"}}}, "identity token"),
        ({"auths": {"r.example": {"auth": "%%%"}}}, "base64"),
        ({"auths": {"r.example": {"auth": base64.b64encode(b"me").decode()}}}, "base64"),
        ({}, "docker login r.example"),
    ],
)
def test_what_is_not_read_is_named_with_the_way_out(value: dict[str, Any], hint: str) -> None:
    basic, missing = found("r.example", **value)
    assert basic is None
    assert hint in missing


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert file_of({"DOCKER_CONFIG": str(tmp_path)}) == tmp_path / "config.json"
    assert file_of({}) == Path.home() / ".docker/config.json"
    assert "docker login" in credentials_for("r.example").missing
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in credentials_for("r.example").missing
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"r.example": {"auth": AUTH}}}))
    assert credentials_for("r.example").basic == AUTH
    assert AUTH not in repr(credentials_for("r.example"))


words = st.sampled_from(["auths", "credHelpers", "credsStore", "r.example", "auth", "username", "password"])
contents = st.recursive(
    st.one_of(st.none(), st.text(max_size=5), st.integers()), lambda inner: st.dictionaries(words, inner, max_size=3)
)


@given(contents)
def test_any_file_is_read(value: Any) -> None:
    one = read(json.dumps(value), "config.json", "r.example")
    assert (one.basic is None) == bool(one.missing)
