"""Programs that people use, through the proxy, with nothing but its variables."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kuberoll_workers.sandboxes.egress.proxy import EgressProxy
from kuberoll_workers.sandboxes.egress.variables import variables
from tests.sandboxes.egress.outside import Outside, files, make_certificates

pytestmark = pytest.mark.slow

SITE = "site.example"
FIELD = "environments[].sandbox.network.allowedHosts"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a program has.

    Attributes:
        home: A directory of its own.
        environment: Its variables: the proxy's, the authority, and settings that keep this machine's own out.
    """

    home: Path
    environment: dict[str, str]
    proxy: EgressProxy

    async def run(self, *command: str, code: int | None = 0) -> str:
        """What a program writes, if it ends with this code; None: with any but 0."""
        if shutil.which(command[0]) is None:
            pytest.skip(f"needs {command[0]}")
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output = (await process.communicate())[0].decode()
        except BaseException:
            process.kill()
            await process.wait()
            raise
        assert process.returncode != 0 if code is None else process.returncode == code, output
        return output


def fill(site: Path) -> None:
    """A site with a text, an index of Python's packages, a repository of git's, and a registry of npm's."""
    (site / "hello").write_text("hello\n")
    (site / "large").write_bytes(os.urandom(3_000_000))
    index = site / "simple" / "little"
    index.mkdir(parents=True)
    wheel = "little-1.0-py3-none-any.whl"
    with zipfile.ZipFile(index / wheel, "w") as archive:
        archive.writestr("little.py", "NAME = 'little'\n")
        archive.writestr("little-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: little\nVersion: 1.0\n")
        archive.writestr("little-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("little-1.0.dist-info/RECORD", "")
    (index / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')
    registry = site / "npm"
    registry.mkdir()
    package = json.dumps({"name": "little", "version": "1.0.0"}).encode()
    with tarfile.open(registry / "little-1.0.0.tgz", "w:gz") as tar:
        member = tarfile.TarInfo("package/package.json")
        member.size = len(package)
        tar.addfile(member, io.BytesIO(package))
    tarball = f"https://{SITE}/npm/little-1.0.0.tgz"
    version = {"name": "little", "version": "1.0.0", "dist": {"tarball": tarball}}
    document = {"name": "little", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (registry / "little").write_text(json.dumps(document))


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    site, home = tmp_path / "site", tmp_path / "home"
    site.mkdir()
    home.mkdir()
    fill(site)
    ca, pem = make_certificates(tmp_path, SITE)
    outside = Outside()
    with files(site, pem) as secure, files(site) as plain:
        outside.put(SITE, 443, secure)
        outside.put(SITE, 80, plain)
        async with outside.proxy(SITE) as (proxy, port):
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "LC_ALL": "C.UTF-8",
                "PIP_CONFIG_FILE": os.devnull,
                "GIT_CONFIG_NOSYSTEM": "1",
                "NPM_CONFIG_GLOBALCONFIG": "/nowhere",
                **dict.fromkeys(("CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "REQUESTS_CA_BUNDLE"), str(ca)),
                **dict.fromkeys(("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE"), str(ca)),
                **variables(port),
            }
            yield Machine(home, environment, proxy)


async def test_curl(machine: Machine) -> None:
    for scheme in ("https", "http"):
        assert await machine.run("curl", "-sSf", f"{scheme}://{SITE}/hello") == "hello\n"
        # curl asks for 100 Continue before it sends more than a little.
        sent = machine.home / "sent"
        sent.write_bytes(os.urandom(2_000_000))
        await machine.run("curl", "-sSf", "--data-binary", f"@{sent}", "-o", "back", f"{scheme}://{SITE}/")
        assert (machine.home / "back").read_bytes() == sent.read_bytes()
    await machine.run("curl", "-sSf", "-H", "Transfer-Encoding: chunked", "-I", f"http://{SITE}/hello")
    assert machine.proxy.refused == {}
    told = await machine.run("curl", "-sSv", "https://evil.example/", code=None)
    assert f"403 KubeRoll does not connect to evil.example:443: it is not among {FIELD}" in told
    assert FIELD in await machine.run("curl", "-sS", "http://evil.example/")
    # TLS for another host than the tunnel's.
    wrong = await machine.run(
        "curl", "-sS", "--connect-to", f"evil.example:443:{SITE}:443", "https://evil.example/", code=None
    )
    assert "name" in wrong
    assert machine.proxy.refused == {
        "evil.example:443": 1,
        "evil.example:80": 1,
        f"{SITE}:443 (TLS for evil.example)": 1,
    }


URLLIB = "import sys, urllib.request; print(len(urllib.request.urlopen(sys.argv[1]).read()))"
REQUESTS = "import sys, requests; print(len(requests.get(sys.argv[1]).content))"


@pytest.mark.parametrize("program", [URLLIB, REQUESTS], ids=["urllib", "requests"])
async def test_python(program: str, machine: Machine) -> None:
    for scheme in ("https", "http"):
        assert await machine.run(sys.executable, "-c", program, f"{scheme}://{SITE}/large") == "3000000\n"
    # The reason of the answer to CONNECT is all that Python tells.
    assert FIELD in await machine.run(sys.executable, "-c", program, "https://evil.example/", code=None)


async def test_pip(machine: Machine) -> None:
    command = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--target",
        "to",
    )
    await machine.run(*command, "--index-url", f"https://{SITE}/simple/", "little")
    assert (machine.home / "to" / "little.py").read_text() == "NAME = 'little'\n"
    told = await machine.run(
        *command, "--retries=1", "--index-url", "https://evil.example/simple/", "little", code=None
    )
    assert FIELD in told


async def test_git(machine: Machine, tmp_path: Path) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@a.example")
    await machine.run("git", "init", "-q", "work")
    (machine.home / "work" / "hello").write_text("hello\n")
    await machine.run("git", "-C", "work", "add", "hello")
    await machine.run("git", "-C", "work", *author, "commit", "-q", "-m", "Begin")
    bare = str(tmp_path / "site" / "repository.git")
    await machine.run("git", "clone", "-q", "--bare", "work", bare)
    await machine.run("git", "-C", bare, "update-server-info")
    for scheme in ("https", "http"):
        await machine.run("git", "clone", "-q", f"{scheme}://{SITE}/repository.git", scheme)
        assert (machine.home / scheme / "hello").read_text() == "hello\n"
    assert "403" in await machine.run("git", "clone", "-q", "https://evil.example/repository.git", code=None)


async def test_npm(machine: Machine) -> None:
    command = ("npm", "install", "--no-audit", "--no-fund", "--no-update-notifier", "--fetch-retries=0")
    await machine.run(*command, "--registry", f"https://{SITE}/npm/", "little")
    assert (machine.home / "node_modules" / "little" / "package.json").exists()
    await machine.run(*command, "--registry", "https://evil.example/npm/", "other", code=None)
    assert list(machine.proxy.refused) == ["evil.example:443"]


async def test_node_s_fetch(machine: Machine) -> None:
    version = await machine.run("node", "-p", "process.versions.node")
    major, minor = map(int, version.split(".")[:2])
    if (major, minor) < (22, 21) or major == 23:
        pytest.skip("needs Node 22.21 or later, which takes NODE_USE_ENV_PROXY")
    for scheme in ("https", "http"):
        program = f"fetch('{scheme}://{SITE}/hello').then(r => r.text()).then(t => process.stdout.write(t))"
        assert await machine.run("node", "-e", program) == "hello\n"
    assert machine.proxy.refused == {}
