"""The images of the Dockerfile, built by buildah on this machine; layers are kept between runs.

Where the machine's pip asks other indexes than PyPI, trusts other certificates or has wheels on its disk, so does the
build: as secrets and mounts, which leave nothing in an image.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from scripts.install import pip_settings
from tests.containers.containerd import PAUSE, Containerd, MissingTools

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGES = {"operator": "operator", "worker": "worker", "generation": "serve"}
"""The targets of images, by the last part of their names."""

BASE_VARIABLE = "KUBEROLL_PYTHON_IMAGE"
"""Environment variable: a Python image to build on, in place of one that debootstrap makes."""
CACHE_VARIABLE = "KUBEROLL_TEST_CACHE"
"""Environment variable: directory of the layers, in place of ~/.cache/kuberoll-tests."""

PYTHON = "docker.io/library/python:tests"
"""The base, for pods of tests that need no more than Python."""

_SUITE = "bookworm"
_MIRROR = "http://deb.debian.org/debian"
_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_BASE = """FROM scratch
COPY root /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["python3"]
"""
_PAUSE = """FROM {base}
ENTRYPOINT ["sleep", "infinity"]
"""
_AUTHORITY = "/run/secrets/ca"
_SECONDS = 1500


def name_of(role: str) -> str:
    """The image's name as the chart and the operator have it by default."""
    return f"kuberoll/{role}:{VERSION}"


def pip_conf(settings: Mapping[str, str]) -> str:
    """The same as a file for the build, where certificates are elsewhere."""
    known = {**settings, **({"cert": _AUTHORITY} if "cert" in settings else {})}
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in sorted(known.items()))]) + "\n"


def folders(settings: Mapping[str, str]) -> list[Path]:
    """Directories of this machine that pip looks for distributions in, and those of files that its settings name."""
    words = [word for name, value in settings.items() if name != "cert" for word in value.split()]
    paths = {Path(word.removeprefix("file://")) for word in words if word.startswith(("/", "file:///"))}
    # An index points to files beside itself.
    return sorted({path.parent if path.name == "simple" or path.is_file() else path for path in paths if path.exists()})


class Builder:
    """Builds images into a storage of the tests' own, one process at a time."""

    def __init__(self, cache: Path) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        self._cache = cache
        self._run = Path("/run/kuberoll-tests-storage") / hashlib.sha256(str(cache).encode()).hexdigest()[:12]
        self._lock = FileLock(cache / "lock")
        self._base: str | None = None

    def buildah(self, *arguments: str, folder: Path = ROOT) -> str:
        """Runs buildah, while no other process uses the storage: the end of one unmounts what another one builds in.

        Raises:
            RuntimeError: It failed; with the end of what it wrote.
        """
        command = ["buildah", *self._storage(), *arguments]
        with self._lock:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False, timeout=_SECONDS, env=_environment()
            )
        if done.returncode:
            said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {said}")
        return done.stdout

    def _storage(self) -> list[str]:
        return ["--root", str(self._cache / "storage"), "--runroot", str(self._run)]

    def base(self) -> str:
        """The Python image to build on: made once, then found by what it is made of."""
        if self._base is None:
            if given := os.environ.get(BASE_VARIABLE):
                self.buildah("pull", "--policy", "missing", given)
                self._base = given
            else:
                with self._lock:
                    self._base = self._debian()
        return self._base

    def _debian(self) -> str:
        if shutil.which("debootstrap") is None:
            raise MissingTools(f"no debootstrap to make a Python image with, and no {BASE_VARIABLE} that names one")
        made_of = repr((_SUITE, _PACKAGES, _BASE))
        name = f"localhost/kuberoll-tests/python:{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
        if self._is_there(name):
            return name
        with tempfile.TemporaryDirectory(dir=self._cache) as folder:
            root = Path(folder) / "root"
            options = ["--variant=minbase", f"--include={','.join(_PACKAGES)}"]
            done = subprocess.run(
                ["debootstrap", *options, _SUITE, str(root), debian_mirror()],
                capture_output=True, text=True, check=False, timeout=_SECONDS,
            )  # fmt: skip
            if done.returncode:
                raise MissingTools(f"debootstrap failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
            (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
            for left in (*(root / "var/cache/apt/archives").glob("*.deb"), *(root / "var/lib/apt/lists").glob("*_*")):
                left.unlink()
            (Path(folder) / "Containerfile").write_text(_BASE)
            self.buildah("bud", "--file", "Containerfile", "--tag", name, ".", folder=Path(folder))
        return name

    def _is_there(self, name: str) -> bool:
        return bool(self.buildah("images", "--quiet", "--filter", f"reference={name}").strip())

    def build(self, target: str) -> str:
        """Builds a target of the Dockerfile, on CPUs; its id. What has not changed is taken as it is."""
        settings = pip_settings()
        base = self.base()
        with self._lock, tempfile.TemporaryDirectory() as folder:
            conf, identity = Path(folder) / "pip.conf", Path(folder) / "id"
            conf.write_text(pip_conf(settings))
            more = [f"--secret=id=pip,src={conf}"]
            if "cert" in settings:
                more.append(f"--secret=id=ca,src={settings['cert']}")
            more += [f"--volume={path}:{path}:ro" for path in folders(settings)]
            more += os.environ.get("KUBEROLL_BUILD_ARGUMENTS", "").split()
            self.buildah(
                "bud", "--layers", "--network", "host", "--isolation", "chroot", *more,
                "--build-arg", f"PYTHON_IMAGE={base}", "--build-arg", "ENGINE=cpu", "--target", target,
                "--iidfile", str(identity), ".",
            )  # fmt: skip
            made = identity.read_text().strip().removeprefix("sha256:")
            self._keep(made, tag_of(target))
            return made

    def has_built(self, target: str) -> bool:
        """Tells whether a target was built of this checkout before, as it is or as it was."""
        return self._is_there(tag_of(target))

    def _keep(self, image: str, name: str) -> None:
        """Names what was built of this checkout, and removes what had the name before: gigabytes, of every change."""
        before = self.buildah("images", "--quiet", "--no-trunc", "--filter", f"reference={name}").split()
        self.buildah("tag", image, name)
        for other in before:
            if image not in other:
                # Another checkout may have built the same.
                with contextlib.suppress(RuntimeError):
                    self.buildah("rmi", other)

    def build_pause(self) -> str:
        """The image of pods' namespaces; its id."""
        base = self.base()
        with self._lock, tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "Containerfile").write_text(_PAUSE.format(base=base))
            identity = Path(folder) / "id"
            options = ["--layers", "--file", "Containerfile", "--iidfile", str(identity)]
            self.buildah("bud", *options, ".", folder=Path(folder))
            return identity.read_text().strip().removeprefix("sha256:")

    def hand_over(self, image: str, containerd: Containerd, name: str) -> None:
        """Gives an image to containerd, under a name."""
        # Uncompressed, and through a pipe: of what is large there is one copy less to write.
        command = ["buildah", *self._storage(), "push", image, f"docker-archive:/dev/stdout:{name}"]
        with (
            self._lock,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()) as archive,
        ):
            containerd.load(archive)
        if archive.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {archive.returncode}")

    def size(self, image: str) -> str:
        """An image's size in words."""
        return self.buildah("images", "--format", "{{.ID}} {{.Size}}", "--all").partition(image[:12])[2].splitlines()[0]


def tag_of(target: str) -> str:
    """The name of a target's image in the cache: the newest that was built of this checkout."""
    return f"localhost/kuberoll-tests/{target}:{hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]}"


def builder() -> Builder:
    """The builder of this user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    return Builder(Path(given) if given else Path.home() / ".cache" / "kuberoll-tests")


def load_python(found: Builder, containerd: Containerd) -> None:
    """Gives containerd what pods need that have no image of KubeRoll's."""
    found.hand_over(found.build_pause(), containerd, PAUSE)
    base = found.buildah("images", "--quiet", "--no-trunc", "--filter", f"reference={found.base()}").split()[0]
    found.hand_over(base.removeprefix("sha256:"), containerd, PYTHON)


def debian_mirror() -> str:
    """Where this machine has Debian from."""
    if shutil.which("apt-get") is None:
        return _MIRROR
    command = ["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME) $(COMPONENT)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sites = re.findall(rf"^(\S+) {_SUITE} main$", done.stdout, re.MULTILINE)
    return sites[0] if sites else _MIRROR


def _environment() -> dict[str, str]:
    # crun, Debian's default for buildah, does not start where both kinds of cgroups are mounted.
    return {**os.environ, "BUILDAH_RUNTIME": "runc"}
