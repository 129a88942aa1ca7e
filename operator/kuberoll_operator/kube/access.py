"""Access to the API server: address, trust and credentials. No password is ever logged."""

from __future__ import annotations

import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import Configuration

_SERVICE_HOST = "KUBERNETES_SERVICE_HOST"
_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LOOKED = "looked at KUBECONFIG, the pod's service account, ~/.kube/config"


class AccessError(Exception):
    """Neither a service account nor a kubeconfig; the message says where they were looked for."""


class Access:
    """Address and credentials of an API server; opens sessions to it.

    Every request carries the current credentials: service accounts' tokens are renewed on disk; those of kubeconfig
    plug-ins are loaded again when the API server answers 401.
    """

    def __init__(self, load: Callable[[], Awaitable[Configuration]], configuration: Configuration) -> None:
        self._load = load
        self._configuration = configuration
        self._ssl = _trust(configuration)

    @property
    def server(self) -> str:
        """Base URL of the API server."""
        return str(self._configuration.host).rstrip("/")

    def session(self, *, traces: Sequence[aiohttp.TraceConfig] = ()) -> aiohttp.ClientSession:
        """A new session, for the caller to close; its requests need absolute URLs."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl),
            trace_configs=list(traces),
            middlewares=(self._authorize,),
            # aiohttp would look at the environment for every request, in a thread.
            proxy=self._configuration.proxy or _proxy_of(self.server),
        )

    async def _authorize(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        before = await self._set_credentials(request)
        response = await handler(request)
        if response.status != 401:
            return response
        self._configuration = await self._load()
        if await self._set_credentials(request) == before:
            return response
        response.release()
        return await handler(request)

    async def _set_credentials(self, request: aiohttp.ClientRequest) -> str | None:
        settings: Any = await self._configuration.auth_settings()
        value = settings.get("BearerToken", {}).get("value")
        if value is None and self._configuration.username:
            value = self._configuration.get_basic_auth_token()
        if value is not None:
            request.headers["Authorization"] = value
        return None if value is None else str(value)


async def load_access(kubeconfig: Path | None = None, context: str | None = None) -> Access:
    """Access by the given kubeconfig, KUBECONFIG, the pod's service account or ~/.kube/config: the first that exists.

    Args:
        context: Context of the kubeconfig; None for its current one.

    Raises:
        AccessError: None of them exists, or it cannot be read.
    """

    async def load() -> Configuration:
        configuration = Configuration()
        file = _file(kubeconfig)
        try:
            if _in_cluster(file):
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            else:
                await config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=file,
                    context=context,
                    client_configuration=configuration,
                    persist_config=False,
                )
        except (config.ConfigException, OSError) as error:
            raise AccessError(f"no access to an API server: {error} ({_LOOKED})") from error
        return configuration

    return Access(load, await load())


def default_namespace(context: str | None = None) -> str:
    """Namespace to use if none is named, as kubectl chooses it: the pod's, or that of a kubeconfig's context.

    Args:
        context: Context of the kubeconfig; None for its current one.

    Raises:
        AccessError: The kubeconfig cannot be read, or has no such context.
    """
    file = _file()
    try:
        if _in_cluster(file):
            return _SERVICE_ACCOUNT_NAMESPACE.read_text().strip()
        found, current = config.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise AccessError(
            f"no namespace is given, and there is no default: {error} ({_LOOKED}); set one with -n"
        ) from error
    if context is not None:
        current = next((item for item in found if item["name"] == context), None)
        if current is None:
            raise AccessError(f"the kubeconfig has no context {context!r}")
    return str(current["context"].get("namespace") or "default")


def _file(kubeconfig: Path | None = None) -> str | None:
    return str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG") or None


def _in_cluster(file: str | None) -> bool:
    return not file and bool(os.environ.get(_SERVICE_HOST))


def _proxy_of(server: str) -> str | None:
    """The environment's proxy, unless NO_PROXY excludes the server."""
    url = urlsplit(server)
    return None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)


def _trust(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    # Clusters' certificate authorities often violate RFC 5280 in details; Python 3.13 is stricter than other clients.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
