"""Images are pulled from the real registry, with accounts and tokens, and through what may happen on the way."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socketserver
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.images.credentials import Credentials
from kuberoll_workers.sandboxes.images.errors import (
    AccessDenied,
    DigestMismatch,
    ImageInvalid,
    ImageNotFound,
    PlatformMissing,
    RegistryUnreachable,
)
from kuberoll_workers.sandboxes.images.layers import Limits
from kuberoll_workers.sandboxes.images.manifests import Descriptor, this_platform
from kuberoll_workers.sandboxes.images.registry import Patience, Registry, base_of, challenge, is_local
from kuberoll_workers.sandboxes.images.store import ImageStore
from kuberoll_workers.sandboxes.users import id_map
from tests.sandboxes.images.archives import DIRECTORY, FILE, entry, tar, write_layout
from tests.sandboxes.images.machine import mounted
from tests.sandboxes.images.registries import (
    PASSWORD,
    USER,
    Buildah,
    Running,
    Tokens,
    forward,
    free_port,
    registry,
    reply,
    serving,
)
from tests.sandboxes.images.trees import tree_of

PATIENCE = Patience(seconds=10, tries=3, pause=0)
BASE = tar([entry("./", DIRECTORY), entry("base", FILE, os.urandom(3 << 20))])
TOP = tar([entry("./", DIRECTORY), entry("top", FILE, os.urandom(1000))])


def test_challenges_are_read() -> None:
    found = challenge('Bearer realm="https://a/b?c=d",service="r, \\"x\\"",scope="repository:a:pull,push",error=x')
    assert found.scheme == "bearer"
    assert found.parameters == {
        "realm": "https://a/b?c=d",
        "service": 'r, "x"',
        "scope": "repository:a:pull,push",
        "error": "x",
    }
    assert challenge('Basic realm="x"').scheme == "basic"
    assert challenge("Negotiate").parameters == {}


@given(st.text(max_size=60))
def test_any_header_is_read(text: str) -> None:
    assert challenge(text).scheme == challenge(text).scheme.lower()


def test_http_is_for_this_machine_alone() -> None:
    assert base_of("docker.io") == "https://registry-1.docker.io"
    for host in ("localhost", "localhost:5000", "127.0.0.1:5000", "127.8.9.1", "[::1]:5000"):
        assert (base_of(host), is_local(host)) == (f"http://{host}", True)
    for host in ("ghcr.io", "localhost.example", "128.0.0.1", "registry:5000", "[::2]"):
        assert (base_of(host), is_local(host)) == (f"https://{host}", False)


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(Credentials("secret"))


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Buildah:
    return Buildah(tmp_path_factory.mktemp("buildah"))


@pytest.fixture(scope="module")
def image(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of an image with two layers in buildah's storage."""
    path = tmp_path_factory.mktemp("layout")
    write_layout(path, {"tag": [BASE, TOP]}, Cmd=["/top"])
    name: str = buildah("pull", f"oci:{path}:tag").strip().splitlines()[-1]
    return name


@pytest.fixture(scope="module")
def plain(buildah: Buildah, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A registry for everybody, with the image as `team/app:1`."""
    with registry(tmp_path_factory.mktemp("plain")) as running:
        buildah.push(image, f"{running.host}/team/app:1")
        yield running


@pytest.fixture(autouse=True)
def surroundings(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials are those of the test, and nothing here is meant for a proxy."""
    monkeypatch.setenv("DOCKER_CONFIG", str(place))
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def log_in(place: Path, host: str, password: str = PASSWORD) -> None:
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    (place / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def store_of(place: Path) -> ImageStore:
    return ImageStore(place / "store", id_map(), limits=Limits(reserve=0), patience=PATIENCE)


def blobs(place: Path) -> list[str]:
    return [path.name for path in place.glob("store/*/blobs/*") if not path.name.startswith("lock-")]


@pytest.mark.slow
def test_an_image_that_was_pushed_is_pulled(place: Path, plain: Running) -> None:
    store = store_of(place)
    image = store.image(f"{plain.host}/team/app:1")
    assert image.command == ("/top",)
    assert mounted(id_map(), list(image.layers), place / "scratch", tree_of).keys() == {"base", "top"}
    assert blobs(place) == []
    # By the digest of its manifest, too; its layers are there.
    same = store.image(f"{plain.host}/team/app@{image.digest}")
    assert (same.layers, same.digest) == (image.layers, image.digest)
    assert store.image(f"{plain.host}/team/app:1", refresh=True) == image


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--format=docker"], ["--format=oci", "--compression-format=zstd"]])
def test_formats_of_manifests_and_layers(
    place: Path, plain: Running, buildah: Buildah, image: str, options: list[str]
) -> None:
    buildah.push(image, f"{plain.host}/team/formats:1", *options)
    found = store_of(place).image(f"{plain.host}/team/formats:1")
    assert mounted(id_map(), list(found.layers), place / "scratch", tree_of).keys() == {"base", "top"}


@pytest.mark.slow
def test_a_tag_that_moves_is_seen_when_it_is_asked_for(
    place: Path, plain: Running, buildah: Buildah, image: str
) -> None:
    name = f"{plain.host}/team/moving:latest"
    buildah.push(image, name)
    store = store_of(place)
    before = store.image(name)
    write_layout(place / "other", {"tag": [TOP]})
    buildah.push(buildah("pull", f"oci:{place / 'other'}:tag").strip().splitlines()[-1], name)
    assert store.image(name) == before
    after = store.image(name, refresh=True)
    assert after.layers == before.layers[1:]
    assert store.image(name) == after


@pytest.mark.slow
def test_a_list_of_manifests_gives_this_platform(place: Path, plain: Running, buildah: Buildah, image: str) -> None:
    other = "s390x"
    write_layout(place / "other", {"tag": [TOP]})
    for architectures, name in (((other, this_platform().architecture), "both"), ((other,), "foreign")):
        buildah("manifest", "create", name)
        for architecture in architectures:
            source = image if architecture != other else f"oci:{place / 'other'}:tag"
            buildah("manifest", "add", "--arch", architecture, "--os", "linux", name, source)
        buildah("manifest", "push", "--all", "--tls-verify=false", name, f"docker://{plain.host}/team/{name}:1")
    store = store_of(place)
    assert len(store.image(f"{plain.host}/team/both:1").layers) == 2
    with pytest.raises(PlatformMissing, match="there are linux/s390x"):
        store.image(f"{plain.host}/team/foreign:1")


@pytest.mark.slow
def test_what_is_not_there(place: Path, plain: Running) -> None:
    store = store_of(place)
    for name in ("team/app:other", "team/nothing", f"team/app@sha256:{'0' * 64}"):
        with pytest.raises(ImageNotFound, match="check its name and tag"):
            store.image(f"{plain.host}/{name}")
    with pytest.raises(RegistryUnreachable, match=r"does not answer .*refused.*https_proxy.*the image is not in"):
        store.image(f"127.0.0.1:{free_port()}/team/app")


@pytest.mark.slow
def test_an_image_that_is_there_needs_no_registry(place: Path, buildah: Buildah, image: str, tmp_path: Path) -> None:
    with registry(tmp_path / "short") as running:
        buildah.push(image, f"{running.host}/a:1")
        found = store_of(place).image(f"{running.host}/a:1")
    assert store_of(place).image(f"{running.host}/a:1") == found


@pytest.mark.slow
def test_a_name_and_a_password(place: Path, buildah: Buildah, image: str, tmp_path: Path) -> None:
    with registry(tmp_path / "accounts", accounts=True) as running:
        name = f"{running.host}/private:1"
        buildah.push(image, name, f"--creds={USER}:{PASSWORD}")
        store = store_of(place)
        with pytest.raises(AccessDenied, match=f"`docker login {running.host}` writes them to {place}"):
            store.image(name)
        (place / "config.json").write_text(json.dumps({"credsStore": "desktop"}))
        with pytest.raises(AccessDenied, match="docker-credential-desktop, which is not started here"):
            store.image(name)
        log_in(place, running.host, "wrong")
        with pytest.raises(AccessDenied, match="the credentials are refused"):
            store.image(name)
        log_in(place, running.host)
        assert len(store.image(name).layers) == 2


@pytest.mark.slow
def test_tokens(place: Path, buildah: Buildah, image: str, tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    with tokens.served() as auth, registry(tmp_path / "registry", auth) as running:
        for name in ("public/app", "private/app"):
            buildah.push(image, f"{running.host}/{name}:1", f"--creds={USER}:{PASSWORD}")
        tokens.asked.clear()
        store = store_of(place)
        # Anybody gets one for what is public, with the scope of this one image.
        assert len(store.image(f"{running.host}/public/app:1").layers) == 2
        scope = [("scope", "repository:public/app:pull")]
        assert tokens.asked == [(None, [("account", "any"), ("service", "tests, with a comma"), *scope])]
        with pytest.raises(AccessDenied, match="gives no access, or has no such image"):
            store.image(f"{running.host}/private/app:1")
        log_in(place, running.host, "wrong")
        with pytest.raises(AccessDenied, match="the credentials are refused"):
            store.image(f"{running.host}/private/app:1")
        log_in(place, running.host)
        assert len(store.image(f"{running.host}/private/app:1").layers) == 2
        # A registry takes tokens for a minute longer than they say.
        tokens.seconds = -50
        one = Registry(running.host, "private/app", credentials=lambda: Credentials(None), patience=PATIENCE)
        with pytest.raises(AccessDenied):
            one.manifest("1")


# What stands between.


class Troubles:
    """Stands before a registry, and does something else to its answers first."""

    def __init__(self, behind: str) -> None:
        self.behind = behind
        self.lock = threading.Lock()
        self.seen: list[tuple[str, str | None, str | None]] = []
        self.left: dict[str, int] = {}

    def note(self, request: BaseHTTPRequestHandler) -> None:
        with self.lock:
            self.seen.append((request.path, request.headers.get("Range"), request.headers.get("Authorization")))

    def once(self, request: BaseHTTPRequestHandler, times: int = 1) -> bool:
        with self.lock:
            left = self.left.setdefault(request.path, times)
            self.left[request.path] = left - 1
            return left > 0


@pytest.mark.slow
def test_a_connection_that_ends_is_taken_up_where_it_was(place: Path, plain: Running) -> None:
    trouble = Troubles(plain.host)

    def answer(request: BaseHTTPRequestHandler) -> None:
        trouble.note(request)
        found = forward(request, plain.host)
        if "/blobs/" in request.path and len(found.content) > 10_000 and trouble.once(request, 3):
            request.send_response(found.status)
            for name, value in {**found.headers, "Content-Length": str(len(found.content))}.items():
                request.send_header(name, value)
            request.end_headers()
            request.wfile.write(found.content[: len(found.content) // 2])
            request.close_connection = True
            return
        reply(request, found.status, found.content, found.headers)

    with serving(answer) as host:
        image = store_of(place).image(f"{host}/team/app:1")
    assert len(image.layers) == 2
    ranges = [span for path, span, _ in trouble.seen if span]
    begins = [int(span.removeprefix("bytes=").removesuffix("-")) for span in ranges]
    assert len(begins) == 3
    assert begins == sorted(begins)
    assert begins[0] > 1 << 20


@pytest.mark.slow
def test_a_download_goes_on_in_the_next_attempt(place: Path, plain: Running) -> None:
    trouble = Troubles(plain.host)
    broken = threading.Event()
    broken.set()

    def answer(request: BaseHTTPRequestHandler) -> None:
        trouble.note(request)
        found = forward(request, plain.host)
        if "/blobs/" in request.path and len(found.content) > 10_000 and broken.is_set():
            if trouble.once(request):
                request.send_response(found.status)
                request.send_header("Content-Length", str(len(found.content)))
                request.end_headers()
                request.wfile.write(found.content[: 1 << 20])
            request.close_connection = True
            return
        reply(request, found.status, found.content, found.headers)

    with serving(answer) as host:
        with pytest.raises(RegistryUnreachable):
            store_of(place).image(f"{host}/team/app:1")
        assert any(name.endswith(".part") for name in blobs(place))
        broken.clear()
        trouble.seen.clear()
        assert len(store_of(place).image(f"{host}/team/app:1").layers) == 2
    assert [span for _, span, _ in trouble.seen if span] == [f"bytes={1 << 20}-"]
    assert blobs(place) == []


@pytest.mark.slow
def test_a_registry_that_is_busy_is_asked_again(place: Path, plain: Running) -> None:
    trouble = Troubles(plain.host)
    waited: list[float] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        if trouble.once(request, 2):
            content = json.dumps({"errors": [{"code": "TOOMANYREQUESTS", "message": "slow down"}]}).encode()
            reply(request, 429, content, {"Retry-After": "7"})
            return
        found = forward(request, plain.host)
        reply(request, found.status, found.content, found.headers)

    with serving(answer) as host:
        one = Registry(host, "team/app", credentials=lambda: Credentials(None), patience=PATIENCE, sleep=waited.append)
        one.manifest("1")
        assert waited == [7.0, 7.0]
        trouble.left.clear()
        impatient = Patience(seconds=10, tries=2, pause=0)
        two = Registry(host, "team/app", credentials=lambda: Credentials(None), patience=impatient, sleep=waited.append)
        with pytest.raises(RegistryUnreachable, match=r"answers 429 \(TOOMANYREQUESTS: slow down\): try again later"):
            two.manifest("1")


@pytest.mark.slow
def test_contents_that_are_others_are_refused(place: Path, plain: Running) -> None:
    def answered(change: str) -> Any:
        def answer(request: BaseHTTPRequestHandler) -> None:
            found = forward(request, plain.host)
            content = found.content
            if change in request.path:
                content = bytes([content[0] ^ 1]) + content[1:]
            reply(request, found.status, content, found.headers)

        return answer

    digest = store_of(place).image(f"{plain.host}/team/app:1").digest
    with serving(answered("/blobs/")) as host, pytest.raises(DigestMismatch):
        store_of(place / "blobs").image(f"{host}/team/app:1")
    with serving(answered("/manifests/")) as host, pytest.raises(DigestMismatch, match="was asked for"):
        store_of(place / "manifests").image(f"{host}/team/app@{digest}")
    page = {"Content-Type": "text/html"}
    with (
        serving(lambda request: reply(request, 200, b"<html>", page)) as host,
        pytest.raises(ImageInvalid, match="not JSON"),
    ):
        store_of(place / "page").image(f"{host}/team/app:1")


@pytest.mark.slow
def test_more_than_was_said_is_not_read(tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    wanted = Descriptor(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content) - 10)
    with serving(lambda request: reply(request, 200, content)) as host:
        one = Registry(host, "a", credentials=lambda: Credentials(None), patience=PATIENCE)
        with pytest.raises(DigestMismatch, match="more than the"):
            one.blob(wanted, tmp_path / "part")


@pytest.mark.slow
def test_authorization_stays_with_the_registry(place: Path, buildah: Buildah, image: str, tmp_path: Path) -> None:
    with registry(tmp_path / "accounts", accounts=True) as running:
        buildah.push(image, f"{running.host}/a:1", f"--creds={USER}:{PASSWORD}")
        store_auth = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        elsewhere, here = Troubles(running.host), Troubles(running.host)

        def contents(request: BaseHTTPRequestHandler) -> None:
            elsewhere.note(request)
            digest = request.path.rpartition("/")[2].partition(":")[2]
            (path,) = running.storage.glob(f"docker/registry/v2/blobs/sha256/*/{digest}/data")
            reply(request, 200, path.read_bytes())

        def answer(request: BaseHTTPRequestHandler) -> None:
            here.note(request)
            found = forward(request, running.host)
            if "/blobs/" in request.path and found.status == 200:
                reply(request, 307, b"", {"Location": f"http://{far}{request.path}"})
                return
            reply(request, found.status, found.content, found.headers)

        with serving(contents) as far, serving(answer) as host:
            log_in(place, host)
            assert len(store_of(place).image(f"{host}/a:1").layers) == 2
    assert {header for _, _, header in here.seen} == {None, store_auth}
    assert len(elsewhere.seen) == 3
    assert {header for _, _, header in elsewhere.seen} == {None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "headers", "hint"),
    [
        (307, {"Location": "http://registry.example/x"}, "without encryption"),
        (307, {"Location": "file:///etc/passwd"}, "answers 307"),
        (401, {"Www-Authenticate": 'Bearer realm="http://tokens.example/"'}, "without encryption"),
        (401, {"Www-Authenticate": 'Bearer realm="file:///etc/passwd"'}, "without encryption"),
        (401, {"Www-Authenticate": "Negotiate"}, "neither Basic nor Bearer"),
        (401, {}, "neither Basic nor Bearer"),
        (403, {}, "gives no access"),
    ],
)
def test_what_a_registry_may_not_ask_for(place: Path, status: int, headers: Mapping[str, str], hint: str) -> None:
    log_in(place, "127.0.0.1")
    with (
        serving(lambda request: reply(request, status, b"{}", headers)) as host,
        pytest.raises((AccessDenied, ImageInvalid), match=hint),
    ):
        store_of(place).image(f"{host}/a:1")


@pytest.mark.slow
def test_a_proxy_of_the_environment_is_asked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By HTTPS the client asks the proxy to connect; this one does not.
    asked: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode().strip())
            self.wfile.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.server_address[1]}")
            with pytest.raises(RegistryUnreachable, match=r"Tunnel connection failed: 503"):
                store_of(place).image("registry.example/a:1")
            monkeypatch.setenv("no_proxy", "registry.example")
            with pytest.raises(RegistryUnreachable, match=r"registry\.example does not answer"):
                store_of(place).image("registry.example/a:1")
        finally:
            server.shutdown()
            thread.join()
    assert (
        asked == ["CONNECT registry.example:443 HTTP/1.0"] * 3 or asked == ["CONNECT registry.example:443 HTTP/1.1"] * 3
    )
