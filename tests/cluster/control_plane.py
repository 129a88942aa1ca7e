"""A real control plane for tests: etcd, kube-apiserver and kube-controller-manager as processes of this machine."""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kuberoll_workers.serving.ray_settings import free_ports

DEFAULT_ASSETS = "/usr/local/kubebuilder/bin"
START_SECONDS = 120.0
STOP_SECONDS = 20.0

# What the children of a RolloutJob need. Nothing that evicts from nodes: the test kubelet renews no lease.
CONTROLLERS = (
    "garbage-collector-controller",
    "job-controller",
    "deployment-controller",
    "replicaset-controller",
    "namespace-controller",
    "serviceaccount-controller",
    "endpointslice-controller",
    "ttl-after-finished-controller",
    "resourcequota-controller",
    "disruption-controller",
)


class MissingBinaries(Exception):
    """This machine has no control plane; the message says what is missing and where it was looked for."""


def find_binaries(*names: str) -> dict[str, Path]:
    """Where the binaries are: in KUBEBUILDER_ASSETS, at kubebuilder's usual place, or (etcd, kubectl) on the PATH.

    Raises:
        MissingBinaries: One of them is nowhere.
    """
    assets = Path(os.environ.get("KUBEBUILDER_ASSETS", DEFAULT_ASSETS))
    found: dict[str, Path] = {}
    missing: list[str] = []
    for name in names:
        on_path = shutil.which(name) if name in ("etcd", "kubectl") else None
        if (assets / name).is_file():
            found[name] = assets / name
        elif on_path is not None:
            found[name] = Path(on_path)
        else:
            missing.append(name)
    if missing:
        raise MissingBinaries(
            f"no {', '.join(missing)} in {assets}: set KUBEBUILDER_ASSETS to a directory that has them "
            "(setup-envtest brings etcd and kube-apiserver; kube-controller-manager is in the server tarball)"
        )
    return found


def free_port() -> int:
    """A TCP port that nothing listens on, right now."""
    return free_ports(1)[0]


def _die_with_parent() -> None:
    # A control plane whose tests were killed must not stay behind.
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class ServerProcess:
    """A server in a process group of its own, its output in a file."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.log = Path(command[0]).name, log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=None if environment is None else dict(environment),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Returns when `ready` says so.

        Raises:
            RuntimeError: The process ended, or the time is over; with the end of its log.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} exited with {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} was not ready within {seconds:.0f} s:\n{self.tail()}")
            time.sleep(0.05)

    def tail(self, characters: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    def signal(self, number: int) -> None:
        """Sends a signal to the whole group; nothing when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """SIGTERM, then SIGKILL after so many seconds; returns when the process is gone."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.signal(signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True, slots=True)
class Certificates:
    """An authority, the server's certificate, and the key that signs service accounts' tokens: PEM files."""

    authority: Path
    certificate: Path
    key: Path
    service_accounts: Path


def make_certificates(directory: Path, address: str = "127.0.0.1") -> Certificates:
    """Writes certificates for an address of this machine that are good for a day."""
    authority_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    server_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    accounts_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kuberoll-tests")])
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    now = datetime.datetime.now(datetime.UTC)

    def certificate(context: x509.Name, public: rsa.RSAPublicKey, *, is_authority: bool) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(context)
            .issuer_name(authority_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    content_commitment=False,
                    key_encipherment=not is_authority,
                    data_encipherment=False,
                    key_agreement=False,
                    key_cert_sign=is_authority,
                    crl_sign=is_authority,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
        )

    authority = certificate(authority_name, authority_key.public_key(), is_authority=True)
    server = (
        certificate(server_name, server_key.public_key(), is_authority=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address(address))]),
            critical=False,
        )
    )

    def private(key: rsa.RSAPrivateKey) -> bytes:
        return key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )

    contents = {
        "ca.crt": authority.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        "server.crt": server.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        "server.key": private(server_key),
        "sa.key": private(accounts_key),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return Certificates(*(directory / name for name in contents))


def kubeconfig(url: str, token: str, authority: Path | None = None, namespace: str = "default") -> dict[str, Any]:
    """A kubeconfig of one user; without an authority the address is plain HTTP."""
    cluster: dict[str, Any] = {"server": url}
    if authority is not None:
        cluster["certificate-authority-data"] = base64.b64encode(authority.read_bytes()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "user", "namespace": namespace}}],
        "current-context": "tests",
    }


@dataclass(slots=True)
class ApiServer:
    """A running API server.

    Attributes:
        url: Its address, https.
        token: Of a member of `system:masters`.
        kubeconfig: File with that token.
        authority: Certificate to verify the server by.
        audit_log: JSON lines, one per request that was answered; written before the answer is sent.
        kubectl_path: Where kubectl is, if it is anywhere.
    """

    directory: Path
    url: str
    token: str
    kubeconfig: Path
    authority: Path
    certificates: Certificates
    audit_log: Path
    kubectl_path: Path | None
    _processes: list[ServerProcess] = field(default_factory=list)

    def client(self) -> Any:
        """A new `kubernetes.client.ApiClient` of an administrator; the caller closes it."""
        from kubernetes import client, config

        configuration = client.Configuration()
        load: Any = config.load_kube_config
        load(str(self.kubeconfig), client_configuration=configuration)
        return client.ApiClient(configuration)

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """What kubectl prints, as an administrator.

        Raises:
            MissingBinaries: There is no kubectl.
            RuntimeError: It failed and `check` is true; with what it wrote to its standard error.
        """
        if self.kubectl_path is None:
            raise MissingBinaries("no kubectl on the PATH")
        done = subprocess.run(
            [str(self.kubectl_path), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout if check else done.stdout + done.stderr

    def processes(self) -> list[ServerProcess]:
        return self._processes

    def stop(self) -> None:
        for server in reversed(self._processes):
            server.stop()


def _answers(url: str, token: str | None = None, authority: Path | None = None) -> Callable[[], bool]:
    import ssl

    context = None if authority is None else ssl.create_default_context(cafile=str(authority))
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ready() -> bool:
        try:
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    return ready


def start_api_server(directory: Path) -> ApiServer:
    """Starts etcd and kube-apiserver, with RBAC, service accounts, default admission and an audit log.

    Raises:
        MissingBinaries: This machine has none.
        RuntimeError: One of them did not come up.
    """
    binaries = find_binaries("etcd", "kube-apiserver")
    try:
        kubectl = find_binaries("kubectl")["kubectl"]
    except MissingBinaries:
        kubectl = None
    certificates = make_certificates(directory)
    etcd_client, etcd_peer, port = free_port(), free_port(), free_port()
    token = secrets.token_urlsafe(24)
    tokens = directory / "tokens.csv"
    tokens.write_text(f'{token},admin,admin,"system:masters"\n')
    policy = directory / "audit-policy.json"
    policy.write_text(
        json.dumps(
            {
                "apiVersion": "audit.k8s.io/v1",
                "kind": "Policy",
                "omitStages": ["RequestReceived", "ResponseStarted"],
                "rules": [{"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]}],
            }
        )
    )
    url = f"https://127.0.0.1:{port}"
    config = directory / "admin.kubeconfig"
    config.write_text(json.dumps(kubeconfig(url, token, certificates.authority)))
    server = ApiServer(
        directory, url, token, config, certificates.authority, certificates, directory / "audit.jsonl", kubectl
    )
    try:
        etcd = ServerProcess(
            [
                str(binaries["etcd"]),
                "--name=tests",
                f"--data-dir={directory / 'etcd'}",
                f"--listen-client-urls=http://127.0.0.1:{etcd_client}",
                f"--advertise-client-urls=http://127.0.0.1:{etcd_client}",
                f"--listen-peer-urls=http://127.0.0.1:{etcd_peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{etcd_peer}",
                f"--initial-cluster=tests=http://127.0.0.1:{etcd_peer}",
                "--unsafe-no-fsync",
            ],
            directory / "etcd.log",
        )
        server._processes.append(etcd)
        etcd.wait_until(_answers(f"http://127.0.0.1:{etcd_client}/health"))
        api = ServerProcess(
            [
                str(binaries["kube-apiserver"]),
                f"--etcd-servers=http://127.0.0.1:{etcd_client}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={port}",
                f"--cert-dir={directory}",
                f"--tls-cert-file={certificates.certificate}",
                f"--tls-private-key-file={certificates.key}",
                f"--token-auth-file={tokens}",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={certificates.service_accounts}",
                f"--service-account-signing-key-file={certificates.service_accounts}",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--endpoint-reconciler-type=none",
                "--allow-privileged=true",
                f"--audit-policy-file={policy}",
                f"--audit-log-path={directory / 'audit.jsonl'}",
                "--audit-log-mode=blocking",
            ],
            directory / "kube-apiserver.log",
        )
        server._processes.append(api)
        api.wait_until(_answers(f"{url}/readyz", token, certificates.authority))
    except BaseException:
        server.stop()
        raise
    return server


def start_controller_manager(server: ApiServer) -> ServerProcess:
    """Starts kube-controller-manager with the controllers that a RolloutJob's children need.

    Raises:
        MissingBinaries: This machine has none.
        RuntimeError: It did not come up.
    """
    binary = find_binaries("kube-controller-manager")["kube-controller-manager"]
    port = free_port()
    controller_manager = ServerProcess(
        [
            str(binary),
            f"--kubeconfig={server.kubeconfig}",
            f"--authentication-kubeconfig={server.kubeconfig}",
            f"--authorization-kubeconfig={server.kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={server.directory}",
            f"--root-ca-file={server.authority}",
            f"--service-account-private-key-file={server.certificates.service_accounts}",
            f"--controllers={','.join(CONTROLLERS)}",
            "--leader-elect=false",
            # Tests wait for what it does: its own limits are for clusters of thousands.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        ],
        server.directory / "kube-controller-manager.log",
    )
    server.processes().append(controller_manager)
    health = f"https://127.0.0.1:{port}/healthz"
    try:
        controller_manager.wait_until(_answers_unverified(health))
    except BaseException:
        controller_manager.stop()
        raise
    return controller_manager


def _answers_unverified(url: str) -> Callable[[], bool]:
    import ssl

    # It signs its own certificate.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def ready() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    return ready
