"""Contract between workers and the broker, which makes the pods of their sandboxes.

A worker asks at `{base}/sandboxes/{name}`, where the base is the value of `BROKER_VARIABLE` and names its job, with the
bearer token of `TOKEN_VARIABLE`:

- `PUT` a `SandboxRequest`: make a sandbox, or go on waiting for it. Answers a `SandboxAnswer` when there is something
  to say, and after `WAIT_SECONDS` in any case; asked again with the same name it goes on where it was.
- `DELETE`: remove it; one that is gone is no error. 204.

At `{base}/workers/{worker}` it says, by a `PUT` of `WorkerSandboxes` at least every `RENEW_SECONDS`, which it has. A
sandbox whose worker has not been heard of for its `lease_seconds`, or does not name it, is removed.

The two may be of different releases: fields may be added, and readers ignore unknown ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, StringConstraints
from pydantic.alias_generators import to_camel

BROKER_VARIABLE: Final = "KUBEROLL_SANDBOX_BROKER"
"""Variable of workers with the base URL of their job at the broker: `http://HOST:PORT/v1/jobs/NAMESPACE/NAME`."""

TOKEN_VARIABLE: Final = "KUBEROLL_TOKEN_SANDBOXES"
"""Variable of workers with the bearer token of their job at the broker."""

DRIVER_VARIABLE: Final = "KUBEROLL_SANDBOX_DRIVER"
"""Variable of workers with the driver that makes their sandboxes."""

PODS: Final = "pods"
"""The driver that asks the broker for them."""

TOKEN_SCOPE: Final = "sandboxes"
"""What the token is derived for, beside the scopes of the policy."""

PLACEMENT_VARIABLE: Final = "KUBEROLL_SANDBOX_PLACEMENT"
"""Variable of workers with `Placements`, as JSON: the nodes that their job has quota on; unset: all."""

BROKER_PORT: Final = 8790
"""Port of the broker."""

SANDBOX_PORT: Final = 8791
"""Port of the server inside a sandbox's pod."""

WAIT_SECONDS: Final = 20.0
"""Time after which the broker answers in any case."""

RENEW_SECONDS: Final = 10.0
"""Time in which a worker says what it has."""

CONTAINER: Final = "sandbox"
"""Name of the main container of a sandbox's pod."""

RUNTIME_DIRECTORY: Final = "/.kuberoll"
"""Where a sandbox has the programs that its server is made of, read-only."""

RUNTIME_VARIABLE: Final = "KUBEROLL_SANDBOX_RUNTIME"
"""Variable of images of workers with the directory that these programs are ready in."""

IDENTITY_DIRECTORY: Final = "/.kuberoll-user"
"""Where its server finds whom the image's commands run as."""

IDENTITY_VARIABLE: Final = "KUBEROLL_SANDBOX_USER"
"""Variable of its server with the same, where the broker knows it already."""

CAPABILITIES: Final = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID"),
    *("SETPCAP", "SETUID", "SYS_CHROOT"),
)
"""Rights of root in a sandbox: those that container engines give by default, without raw sockets and device files.

Pod Security admits them at level `baseline`.
"""

SandboxName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")]
WorkerName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")]
_Seconds = Annotated[float, Field(gt=0, le=604_800.0)]
_MOST_BYTES: Final = 130_000


def _is_passed(text: str) -> str:
    """Check that a program can be given a text: Linux passes no argument, and no variable, of 128 KiB."""
    if (size := len(text.encode(errors="surrogatepass"))) > _MOST_BYTES:
        raise ValueError(f"{size} bytes, and Linux passes at most {_MOST_BYTES}: the sandbox has too many variables")
    return text


_Text = Annotated[str, AfterValidator(_is_passed)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class Placement(_Message):
    """Nodes that a queue has granted quota on.

    Attributes:
        node_selector: Labels of the nodes.
        tolerations: Tolerations of their taints, as in a pod.
    """

    node_selector: dict[str, str] = Field(default_factory=dict, max_length=64)
    tolerations: list[dict[str, Any]] = Field(default_factory=list, max_length=64)


class Placements(RootModel[dict[str, Placement]]):
    """Nodes of the sandboxes of each environment, by its name; of one that is not named, all."""


class SandboxRequest(_Message):
    """A sandbox that a worker wants; its job decides what it may want.

    The programs inside are the worker's own, of its image: the broker passes on how they are started.

    Attributes:
        environment: Name of the environment in the job.
        worker: Name of the worker, which no other has.
        command: What the container runs.
        variables: Its variables, in addition to the image's. Nothing in them is secret.
        identify: What writes whom the image's commands run as to `IDENTITY_DIRECTORY`, and to its termination message,
            as `uid:gid`; empty: the command need not know.
        cpus: Processors that it may use; None: no limit.
        memory, storage: Bytes of memory and of files; None: no limit.
        network: What it reaches: nothing, or everything.
        read_only: True if its root is read-only.
        placement: Nodes that it may run on.
        lease_seconds: It ends when its worker has not been heard of for so long.
        start_seconds, total_seconds: Time that its start may take, and that it may exist.
    """

    environment: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    worker: WorkerName
    image: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    command: Annotated[list[_Text], Field(min_length=1, max_length=64)]
    variables: dict[str, _Text] = Field(default_factory=dict, max_length=64)
    identify: Annotated[list[_Text], Field(max_length=64)] = Field(default_factory=list)
    cpus: Annotated[float, Field(gt=0, le=65_536)] | None = None
    memory: Annotated[int, Field(gt=0, le=1 << 50)] | None = None
    storage: Annotated[int, Field(gt=0, le=1 << 50)] | None = None
    network: Literal["None", "All"] = "None"
    read_only: bool = False
    placement: Placement = Field(default_factory=Placement)
    lease_seconds: _Seconds = 60.0
    start_seconds: _Seconds = 600.0
    total_seconds: _Seconds = 86_400.0


class SandboxAnswer(_Message):
    """What became of it.

    Attributes:
        state: Waiting: ask again. Running: its server is at `address`. Ended: it was there, and is gone. Refused: there
            will never be such a sandbox in this job.
        address: `HOST:PORT` of its server; None unless it runs.
        reason: What it waits for, or why it is not there, for people.
        event: Kubernetes' own word for why it is not there, such as `Evicted`; empty: there is none.
    """

    state: Literal["Waiting", "Running", "Ended", "Refused"]
    address: str | None = None
    reason: str = ""
    event: str = ""


class WorkerSandboxes(_Message):
    """What a worker has: the names of its sandboxes, those that it waits for included."""

    names: Annotated[list[SandboxName], Field(max_length=16_384)] = Field(default_factory=list)
