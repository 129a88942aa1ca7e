"""The policy's endpoint, where weights are published: how to find it, and the two requests that publishing needs."""

from __future__ import annotations

import ipaddress
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kuberoll_workers.output.policy_file import POLICY_FILE, PolicyFile

_SECONDS = 30.0
_OWN_VERSION = "0"


class EndpointError(Exception):
    """The endpoint cannot be found, does not answer, or refuses.

    Attributes:
        status: Of its answer; None: there was none.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServedWeights(msgspec.Struct, kw_only=True, frozen=True):
    """Versions that the replicas serve.

    Attributes:
        wanted: Version that they are to serve.
        replicas: Version of each replica that takes requests; None: it could not be asked.
        problems: Why a replica does not serve the wanted version.
    """

    wanted: str
    replicas: dict[str, str | None]
    problems: dict[str, str] = {}

    @property
    def everywhere(self) -> str | None:
        """The version that every replica serves; None: they differ, or one has a problem or could not be asked."""
        versions = set(self.replicas.values())
        return versions.pop() if len(versions) == 1 and not self.problems else None

    def __str__(self) -> str:
        if (version := self.everywhere) is not None:
            return f"version {version} is served everywhere"
        if not self.replicas:
            return "no replica takes requests"
        return "; ".join(self._line(name) for name in self.replicas)

    def _line(self, name: str) -> str:
        version, problem = self.replicas[name], self.problems.get(name)
        line = f"replica {name} serves version {version}" if version is not None else f"replica {name} does not answer"
        return line if problem is None else f"{line} ({problem})"


class WeightsEndpoint(Protocol):
    """Where versions of weights are asked for, and where one sees which are served."""

    def weights(self) -> ServedWeights:
        """Read which versions are served.

        Raises:
            EndpointError: It does not answer.
        """
        ...

    def serve(self, uri: str | None, version: str) -> None:
        """Have all replicas serve a version; they load it after this has returned.

        Args:
            uri: Directory or URI, as replicas see it; None: the model's own weights, version 0.

        Raises:
            EndpointError: It does not answer, or refuses.
        """
        ...


@dataclass(frozen=True, slots=True)
class PolicyEndpoint:
    """The endpoint of a job's policy.

    Attributes:
        url: Base URL.
        token: Of the scope `weights`; None: it asks for none.
    """

    url: str
    token: str | None = None

    def weights(self) -> ServedWeights:
        """Read which versions are served.

        Raises:
            EndpointError: It does not answer.
        """
        try:
            return msgspec.convert(self._ask("GET", None), ServedWeights)
        except msgspec.ValidationError as error:
            raise EndpointError(f"{self.url}/v1/weights is not a KubeRoll policy: {error}") from error

    def serve(self, uri: str | None, version: str) -> None:
        """Have all replicas serve a version; they load it after this has returned.

        Args:
            uri: Directory or URI, as replicas see it; None: the model's own weights, version 0.

        Raises:
            EndpointError: It does not answer, or refuses: the version belongs to other weights, for example.
        """
        self._ask("POST", {"uri": uri, "version": version})

    def _ask(self, method: str, body: Mapping[str, Any] | None) -> Any:
        url = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/weights"
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise EndpointError(f"{url}: the URL of a policy begins with http:// or https://")
        request = urllib.request.Request(
            url, method=method, data=None if body is None else msgspec.json.encode(body), headers=self._headers()
        )
        try:
            with _opener(url).open(request, timeout=_SECONDS) as answer:
                return msgspec.json.decode(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                text = _message(error.read(4096))
            hint = "; give a token of the scope `weights`" if error.code in (401, 403) else ""
            raise EndpointError(f"{method} {url} answered {error.code}: {text}{hint}", status=error.code) from error
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise EndpointError(f"{method} {url}: {type(error).__name__}: {error}") from error

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers if self.token is None else {**headers, "Authorization": f"Bearer {self.token}"}


def run_endpoint(run: str | Path) -> PolicyEndpoint:
    """Find the endpoint of a run that `kuberoll run` is making on this machine.

    Args:
        run: Its directory: `--output`, or where its logs are if that is an object store.

    Raises:
        EndpointError: It is not running, has no policy of its own, or is another user's.
    """
    file = Path(run).expanduser() / POLICY_FILE
    try:
        policy = msgspec.json.decode(file.read_bytes(), type=PolicyFile)
        tokens = msgspec.json.decode(Path(policy.tokens).read_bytes(), type=dict[str, str])
    except FileNotFoundError as error:
        raise EndpointError(
            f"{error.filename}: is not there: the file is there while `kuberoll run` generates with an engine that is "
            "its own or that of `kuberoll serve`. Start the run, or give url and token to PolicyEndpoint"
        ) from error
    except (OSError, msgspec.MsgspecError) as error:
        raise EndpointError(f"{file}: {error}") from error
    return PolicyEndpoint(url=policy.url, token=tokens.get("weights"))


def _opener(url: str) -> urllib.request.OpenerDirector:
    # A proxy of the environment cannot reach this machine's own ports.
    proxies: dict[str, str] | None = {} if _is_loopback(urllib.parse.urlsplit(url).hostname or "") else None
    return urllib.request.build_opener(urllib.request.ProxyHandler(proxies))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
