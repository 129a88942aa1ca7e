"""Images in registries, by the API of OCI's distribution specification, and the tokens of distribution's.

The client is the standard library's: callers give it a thread. `oras`, the library on PyPI, was looked at: it has no
timeouts, does not check what it gets by digests, does not choose a platform, and keeps one token for all scopes.
Proxies and certificates are those of the environment: `https_proxy`, `no_proxy`, `SSL_CERT_FILE`.
"""

from __future__ import annotations

import contextlib
import email.message
import errno
import hashlib
import http.client
import ipaddress
import json
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from kuberoll_workers.sandboxes.images.credentials import Credentials
from kuberoll_workers.sandboxes.images.errors import (
    AccessDenied,
    DigestMismatch,
    ImageInvalid,
    ImageNotFound,
    ImageUnavailable,
    NoSpace,
    RegistryUnreachable,
)
from kuberoll_workers.sandboxes.images.manifests import ACCEPTED, MAX_BYTES, Descriptor, checked, digest_of
from kuberoll_workers.sandboxes.images.references import DOCKER_HUB

_HUB_HOST: Final = "registry-1.docker.io"
_CHUNK: Final = 1 << 20
_TEMPORARY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_WAIT: Final = 30.0
_Result = TypeVar("_Result")
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a registry is tried.

    Attributes:
        seconds: Until a connection is there, and between bytes.
        tries: Attempts that bring nothing, one after another.
        pause: Seconds before the second attempt; twice as many before each further one.
    """

    seconds: float = 30.0
    tries: int = 4
    pause: float = 0.5


@dataclass(frozen=True, slots=True)
class Challenge:
    """What a registry wants before it answers: a header `Www-Authenticate`."""

    scheme: str
    parameters: Mapping[str, str]


def challenge(header: str) -> Challenge:
    """A header `Www-Authenticate` as a value; of several challenges in it the first."""
    scheme, _, rest = header.strip().partition(" ")
    parameters: dict[str, str] = {}
    for name, quoted, plain in _PARAMETER.findall(rest):
        parameters.setdefault(name.lower(), re.sub(r"\\(.)", r"\1", quoted) or plain)
    return Challenge(scheme.lower(), parameters)


def base_of(host: str) -> str:
    """Where a registry's API is: by HTTP only on this machine."""
    if host == DOCKER_HUB:
        return f"https://{_HUB_HOST}"
    return f"{'http' if is_local(host) else 'https'}://{host}"


def is_local(host: str) -> bool:
    """True for a host that is this machine, with or without a port."""
    name = urllib.parse.urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows where contents are; never from HTTPS to HTTP. The handler leaves `Authorization` behind."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        target = urllib.parse.urlsplit(newurl)
        if target.scheme != "https" and not (target.scheme == "http" and is_local(target.netloc)):
            raise AccessDenied(f"{req.full_url} leads to {newurl:.300}, without encryption")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Registry:
    """A repository of a registry, read; for any number of threads."""

    def __init__(
        self,
        host: str,
        repository: str,
        *,
        credentials: Callable[[], Credentials],
        patience: Patience | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            credentials: Reads them, when they are asked for.
        """
        self._host = host
        self._repository = repository
        self._base = base_of(host)
        self._credentials = credentials
        self._patience = patience or Patience()
        self._sleep = sleep
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._authorization: str | None = None
        proxies = urllib.request.ProxyHandler({} if is_local(host) else None)
        self._opener = urllib.request.build_opener(proxies, _Redirects)
        self._where = f"image {host}/{repository}"

    def stop(self) -> None:
        """End what other threads download."""
        self._stopped.set()

    def manifest(self, name: str) -> tuple[bytes, Descriptor]:
        """A manifest or a list of them, by tag or digest, with the digest that it has.

        Raises:
            ImageNotFound, AccessDenied, RegistryUnreachable, DigestMismatch
        """
        by_digest = ":" in name
        said = f"{self._where}{'@' if by_digest else ':'}{name}"

        def get() -> tuple[bytes, Descriptor]:
            with self._open(f"manifests/{name}", said, {"Accept": ACCEPTED}) as response:
                content = response.read(MAX_BYTES + 1)
                if len(content) > MAX_BYTES:
                    raise ImageInvalid(f"{said}: a manifest of more than {MAX_BYTES} bytes")
                self._check_length(response, len(content))
                digest = name if by_digest else digest_of(content)
                kind = response.headers.get_content_type()
                return checked(content, digest, said), Descriptor(digest, len(content), kind)

        return self._persistently(get)

    def small(self, descriptor: Descriptor) -> bytes:
        """The content of a blob that is no layer.

        Raises:
            ImageNotFound, AccessDenied, RegistryUnreachable, DigestMismatch
        """
        said = f"{self._where}: {descriptor.digest}"

        def get() -> bytes:
            with self._open(f"blobs/{descriptor.digest}", said, {}) as response:
                content: bytes = response.read(MAX_BYTES + 1)
                self._check_length(response, len(content))
                return checked(content, descriptor.digest, said)

        return self._persistently(get)

    def blob(self, descriptor: Descriptor, part: Path) -> None:
        """Download a blob into a file, whole and checked; what is there of it already is not asked for again.

        Raises:
            ImageNotFound, AccessDenied, RegistryUnreachable
            DigestMismatch: It is another content; the file is removed.
        """
        said = f"{self._where}: {descriptor.digest}"
        with part.open("a+b", buffering=0) as file:
            tries = 0
            while True:
                before = file.seek(0, os.SEEK_END)
                if before > descriptor.size:
                    file.truncate(before := 0)
                if before < descriptor.size or not descriptor.size:
                    try:
                        self._append(descriptor, file, before, said)
                    except RegistryUnreachable as error:
                        grown = file.seek(0, os.SEEK_END) > before
                        tries = 1 if grown else tries + 1
                        if tries >= self._patience.tries:
                            raise
                        self._pause(tries, error)
                        continue
                file.seek(0)
                hashed = hashlib.file_digest(file, descriptor.digest.partition(":")[0]).hexdigest()
                if descriptor.digest.endswith(f":{hashed}"):
                    os.fsync(file.fileno())
                    return
                part.unlink()
                raise DigestMismatch(
                    f"{said}: what was downloaded has the digest {hashed}: if it is so again, push the image again"
                )

    def _append(self, descriptor: Descriptor, file: IO[bytes], before: int, said: str) -> None:
        headers = {"Range": f"bytes={before}-"} if before else {}
        with self._open(f"blobs/{descriptor.digest}", said, headers) as response:
            if before and response.status != 206:
                file.truncate(before := 0)
            at = before
            try:
                while data := response.read(_CHUNK):
                    if self._stopped.is_set():
                        raise ImageUnavailable(f"{said}: it is not needed any more")
                    at += len(data)
                    if at > descriptor.size:
                        file.truncate(0)
                        raise DigestMismatch(f"{said}: more than the {descriptor.size} bytes that the manifest says")
                    _write(file, data)
            except http.client.IncompleteRead as error:
                _write(file, error.partial)
                raise
            if at < descriptor.size:
                raise RegistryUnreachable(f"{said}: the connection ended after {at} of {descriptor.size} bytes")

    @staticmethod
    def _check_length(response: Any, count: int) -> None:
        length = response.headers.get("Content-Length")
        if length is not None and length.isdecimal() and count < int(length) <= MAX_BYTES:
            raise http.client.IncompleteRead(b"", int(length) - count)

    def _persistently(self, get: Callable[[], _Result]) -> _Result:
        tries = 0
        while True:
            try:
                return get()
            except RegistryUnreachable as error:
                tries += 1
                if tries >= self._patience.tries:
                    raise
                self._pause(tries, error)

    def _pause(self, tries: int, error: RegistryUnreachable) -> None:
        self._sleep(max(self._patience.pause * 2 ** (tries - 1), error.wait))

    @contextmanager
    def _open(self, path: str, said: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """An answer, with authorization if the registry wants some."""
        url = f"{self._base}/v2/{self._repository}/{path}"
        with _told(self._host, said):
            used = self._authorization
            try:
                response = self._request(url, headers, used)
            except urllib.error.HTTPError as error:
                if error.code != 401:
                    raise
                with error:
                    self._authorize(error.headers, used, said)
                try:
                    response = self._request(url, headers, self._authorization)
                except urllib.error.HTTPError as again:
                    if again.code in (401, 403):
                        raise self._denied(said, again) from again
                    raise
            with response:
                yield response

    def _request(self, url: str, headers: Mapping[str, str], authorization: str | None) -> Any:
        request = urllib.request.Request(url, headers={"User-Agent": "kuberoll", **headers})
        if authorization:
            # Not for whom the registry redirects to.
            request.add_unredirected_header("Authorization", authorization)
        return self._opener.open(request, timeout=self._patience.seconds)

    def _authorize(self, headers: email.message.Message, used: str | None, said: str) -> None:
        with self._lock:
            if self._authorization != used:
                # Another thread did.
                return
            offers = [challenge(header) for header in headers.get_all("Www-Authenticate") or []]
            credentials = self._credentials()
            for offer in offers:
                if offer.scheme == "bearer" and "realm" in offer.parameters:
                    self._authorization = f"Bearer {self._token(offer, credentials, said)}"
                    return
            if any(offer.scheme == "basic" for offer in offers):
                if credentials.basic is None:
                    raise AccessDenied(f"{said}: the registry asks who wants it; {credentials.missing}")
                self._authorization = f"Basic {credentials.basic}"
                return
        raise AccessDenied(f"{said}: the registry wants an authorization that is neither Basic nor Bearer")

    def _token(self, offer: Challenge, credentials: Credentials, said: str) -> str:
        realm = urllib.parse.urlsplit(offer.parameters["realm"])
        if realm.scheme != "https" and not (realm.scheme == "http" and is_local(realm.netloc) and is_local(self._host)):
            raise AccessDenied(f"{said}: the registry gives tokens at {realm.geturl():.300}, without encryption")
        query = urllib.parse.parse_qsl(realm.query)
        query += [(name, offer.parameters[name]) for name in ("service",) if name in offer.parameters]
        query.append(("scope", f"repository:{self._repository}:pull"))
        url = realm._replace(query=urllib.parse.urlencode(query)).geturl()
        basic = None if credentials.basic is None else f"Basic {credentials.basic}"
        try:
            with self._request(url, {}, basic) as response:
                answer = json.loads(response.read(MAX_BYTES))
            token = answer.get("token") or answer.get("access_token")
        except urllib.error.HTTPError as error:
            if error.code in (400, 401, 403):
                raise self._denied(said, error) from error
            raise
        except (ValueError, AttributeError) as error:
            raise AccessDenied(f"{said}: {realm.netloc} gave no token: {error}") from error
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise AccessDenied(f"{said}: {realm.netloc} gave no token")
        return token

    def _denied(self, said: str, error: urllib.error.HTTPError) -> AccessDenied:
        credentials = self._credentials()
        why = credentials.missing or "the credentials are refused: `docker login` again, or ask for access"
        return AccessDenied(f"{said}: the registry gives no access, or has no such image ({error.code}); {why}")


@contextmanager
def _told(host: str, said: str) -> Iterator[None]:
    """Turn what the client raises into errors that say what to do."""
    try:
        yield
    except urllib.error.HTTPError as error:
        with contextlib.closing(error):
            words = _words(error)
        if error.code == 404:
            raise ImageNotFound(f"{said}: {host} has no such image{words}: check its name and tag") from error
        if error.code in _TEMPORARY:
            unreachable = RegistryUnreachable(f"{said}: {host} answers {error.code}{words}: try again later")
            unreachable.wait = _wait_of(error.headers)
            raise unreachable from error
        if error.code in (401, 403):
            raise AccessDenied(f"{said}: {host} gives no access ({error.code}){words}") from error
        raise ImageInvalid(f"{said}: {host} answers {error.code}{words}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise RegistryUnreachable(
            f"{said}: {host} does not answer ({reason}): check the name, the network, https_proxy and no_proxy, and "
            "SSL_CERT_FILE for a registry's own certificates"
        ) from error


def _write(file: IO[bytes], data: bytes) -> None:
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = NoSpace if full else ImageUnavailable
        hint = ": free some space, or give another directory for images" if full else ""
        raise kind(f"{file.name}: {error.strerror}{hint}") from error


def _words(error: urllib.error.HTTPError) -> str:
    """What a registry says beside the number of an error."""
    try:
        found = json.loads(error.read(4096))["errors"][0]
        return f" ({found.get('code')}: {found.get('message')})"[:300]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, http.client.HTTPException):
        return ""


def _wait_of(headers: email.message.Message) -> float:
    text = headers.get("Retry-After") or ""
    return min(float(text), _MAX_WAIT) if text.isdecimal() else 0.0
