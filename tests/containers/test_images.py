"""What is in the images, and what is not, seen from inside."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.containers.images import IMAGES, ROOT, builder, folders, tag_of
from tests.containers.node import ContainerNode, phase
from tests.containers.test_runtime import pod

pytestmark = pytest.mark.timeout(900, func_only=True)

MODULES = {
    "operator": "kuberoll_operator",
    "worker": "kuberoll_workers.pods.worker",
    "generation": "kuberoll_workers.pods.generation",
}
"""What runs in each."""
ABSENT: Mapping[str, tuple[str, ...]] = {
    "operator": ("torch", "vllm", "pip", "ray"),
    "worker": ("torch", "vllm"),
    "generation": ("pip", "triton"),
}


def test_builds_see_the_files_that_pip_s_settings_name(tmp_path: Path) -> None:
    for name in ("settings/constraints.txt", "index/simple/uv/index.html", "wheels/a.whl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    settings = {
        "constraint": f"{tmp_path}/settings/constraints.txt",
        "index-url": f"file://{tmp_path}/index/simple",
        "find-links": f"{tmp_path}/wheels {tmp_path}/missing",
        "cert": f"{tmp_path}/wheels/a.whl",
        "timeout": "60",
    }
    assert folders(settings) == [tmp_path / "index", tmp_path / "settings", tmp_path / "wheels"]


@pytest.fixture(scope="session", params=IMAGES)
def built(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A role and its image."""
    role = str(request.param)
    return role, request.getfixturevalue(f"{role}_image")


async def test_an_image_holds_what_runs_and_no_tools(node: ContainerNode, built: tuple[str, str]) -> None:
    role, image = built
    # As a pod whose spec says nothing of users.
    home = node.run(pod(role, "", image=image, command=["sleep", "infinity"]))
    await node.until(role, lambda item: phase(item) == "Running", 240)

    async def run(*command: str) -> tuple[int, str]:
        return await home.execute("main", command, 300)

    code, text = await run("python", "-m", MODULES[role], "--help")
    assert code == 0, text
    assert (await run("id"))[1].split() == ["uid=65532(kuberoll)", "gid=65532(kuberoll)", "groups=65532(kuberoll)"]
    for tool in ("gcc", "cc", "make", "git"):
        assert (await run("sh", "-c", f"command -v {tool}"))[0] != 0
    check = "import importlib.util as u, sys; print([name for name in sys.argv[1:] if u.find_spec(name)])"
    assert (await run("python", "-c", check, *ABSENT[role]))[1].strip() == "[]"
    for path in ("/opt/kuberoll/written", "/etc/written"):
        assert (await run("touch", path))[0] != 0
    for path in ("/tmp/written", "/home/kuberoll/written"):
        assert (await run("touch", path))[0] == 0
    # Nobody compiles them again at every start.
    compiled = "import email, kuberoll_api, pathlib; print(pathlib.Path(kuberoll_api.__cached__).exists())"
    assert (await run("python", "-c", compiled))[1].strip() == "True"
    # Nothing of the machine that it was built on.
    assert (await run("sh", "-c", "cat /etc/pip.conf /run/secrets/*; env | grep -i -E '^(pip|https?_proxy)'"))[0] != 0


def test_an_image_says_what_it_is(built: tuple[str, str]) -> None:
    role, _ = built
    found = builder()
    inspected = json.loads(found.buildah("inspect", "--type", "image", found.build(IMAGES[role])))
    labels = inspected["OCIv1"]["config"]["Labels"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels["org.opencontainers.image.version"] == project["version"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_nodes_keep_the_dependencies_of_workers_once(worker_image: str, generation_image: str) -> None:
    def layers(role: str) -> list[tuple[str, str]]:
        inspected = json.loads(builder().buildah("inspect", "--type", "image", tag_of(IMAGES[role])))["OCIv1"]
        made_by = [entry["created_by"] for entry in inspected["history"] if not entry.get("empty_layer")]
        return list(zip(inspected["rootfs"]["diff_ids"], made_by, strict=True))

    shared = [one for one, other in zip(layers("worker"), layers("generation"), strict=False) if one == other]
    assert "dependencies.sh --without-engine workers" in shared[-1][1]
