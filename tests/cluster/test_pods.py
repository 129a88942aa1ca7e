"""What the tests' pods are, where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.pods import PODS_VARIABLE, kind_of_pods
from tests.containers.containerd import MissingTools, require_tools
from tests.containers.images import CACHE_VARIABLE, IMAGES, builder, tag_of

NOTHING = "FROM scratch\nLABEL of=nothing\n"


@pytest.mark.parametrize("kind", ["containers", "processes"])
def test_the_environment_prevails(kind: str) -> None:
    assert kind_of_pods({PODS_VARIABLE: kind}) == kind


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="KUBEROLL_TEST_PODS is containers or processes, not 'podman'"):
        kind_of_pods({PODS_VARIABLE: "podman"})


def test_pods_are_containers_where_all_their_images_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        require_tools()
    except MissingTools as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    assert kind_of_pods({}) == "processes"
    (tmp_path / "Containerfile").write_text(NOTHING)
    found = builder()
    for role, kind in (("worker", "processes"), ("generation", "containers")):
        found.buildah("bud", "--tag", tag_of(IMAGES[role]), "--file", "Containerfile", ".", folder=tmp_path)
        assert kind_of_pods({}) == kind
