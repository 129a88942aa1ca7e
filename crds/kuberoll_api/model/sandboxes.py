"""The machine that each trajectory of an environment has: its sandbox."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.pod_fields import PodTemplate
from kuberoll_api.model.pod_templates import check_pod_spec, check_untrusted, mapping_of
from kuberoll_api.model.pods import Resources
from kuberoll_api.model.traits import IDENTITY, OPERATION, POD
from kuberoll_api.model.types import VARIABLE_PATTERN, DnsName, Model, Seconds, Text
from kuberoll_api.sandboxes import CONTAINER

Host = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=253, pattern=r"^([*][.])?[A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?[.]?(:[0-9]{1,5})?$"
    ),
]
"""A host's name, all names below one (`*.pypi.org`), or an address of IPv4; with a port if it is neither 80 nor 443."""


def _names(found: dict[str, str]) -> dict[str, str]:
    # The CRD's schema has no patterns of keys.
    for name in found:
        if not re.fullmatch(VARIABLE_PATTERN, name):
            raise contradiction("the name must be letters, digits and _, and no digit first", name)
    return found


Variables = Annotated[dict[str, Text], Field(max_length=256), AfterValidator(_names)]


class SandboxNetwork(Model):
    """What sandboxes may reach at most; each row may ask for less."""

    mode: Literal["None", "Allowlist", "All"] = Field(
        default="None",
        description="None: nothing. Allowlist: allowedHosts only, by HTTP and HTTPS through a proxy; there is no DNS. "
        "All: everything.",
    )
    allowed_hosts: list[Host] = Field(
        default_factory=list,
        max_length=256,
        description="Hosts, with Allowlist: names, or all names below one (*.pypi.org); with a port if it is neither "
        "80 nor 443.",
    )

    @model_validator(mode="after")
    def _hosts_for_allowlist(self) -> Self:
        if self.allowed_hosts and self.mode != "Allowlist":
            raise contradiction("is for mode Allowlist; set that, or remove the hosts", "allowedHosts")
        if not self.allowed_hosts and self.mode == "Allowlist":
            raise contradiction("mode Allowlist needs hosts; name some, or set mode: None", "allowedHosts")
        return self


class Sandbox(Model):
    """The machine that each trajectory has; what a row says of its machine comes first."""

    image: Annotated[Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None, IDENTITY] = Field(
        default=None,
        description="Image of rows that name none. Without one they have the programs of the host (host:/), where the "
        "driver of sandboxes has that.",
    )
    built_images: Annotated[Annotated[str, StringConstraints(min_length=1, max_length=512)] | None, OPERATION] = Field(
        default=None,
        description="Where images are that tasks have Dockerfiles for: the --tag of `kuberoll images build`, and "
        "before it the directory of its --layout, as in oci:DIRECTORY:TAG.",
    )
    resources: Annotated[Resources, OPERATION] = Field(
        default_factory=Resources,
        description="Limits of cpu, memory and ephemeral-storage of rows that say none; of others they are the most. "
        "Requests are of pods; absent: as the limits.",
    )
    variables: Annotated[Variables, IDENTITY] = Field(
        default_factory=dict, description="Environment variables of all commands."
    )
    user: Annotated[Annotated[str, StringConstraints(min_length=1, max_length=256)] | None, IDENTITY] = Field(
        default=None,
        description="User of commands for which rows name none: a name or a number, with a group after a colon; "
        "absent: the image's.",
    )
    workdir: Annotated[Annotated[str, StringConstraints(pattern=r"^/", max_length=4096)] | None, IDENTITY] = Field(
        default=None, description="Working directory of rows that name none; absent: the image's."
    )
    network: Annotated[SandboxNetwork | None, IDENTITY] = Field(
        default=None,
        description="What sandboxes may reach at most. Absent: nothing; then rows that ask for a network are refused, "
        "rather than played without it.",
    )
    start_seconds: Annotated[Seconds, OPERATION] = Field(
        default=600.0, description="Maximum duration of the start of rows that say none, with the pull of the image."
    )
    total_seconds: Annotated[Annotated[float, Field(gt=0, le=604800.0)], OPERATION] = Field(
        default=86_400.0, description="A sandbox ends after this time in any case."
    )
    start_ahead: Annotated[Annotated[int, Field(ge=0, le=4096)] | None, OPERATION] = Field(
        default=None,
        description="Maximum number of sandboxes of a worker that are started before their trajectories begin, in "
        "addition to those of rollout.concurrency; 0: none. Absent: an eighth of rollout.concurrency, rounded up.",
    )
    runtime_class_name: Annotated[DnsName | None, POD] = Field(
        default=None, description="RuntimeClass of the pods, such as one of gVisor or Kata Containers."
    )
    pod_template: Annotated[PodTemplate | None, POD] = Field(
        default=None,
        description="A pod template that is merged over the sandboxes' pods, whose main container is called sandbox: "
        "nodeSelector, tolerations, imagePullSecrets, hostUsers, annotations. It can give them neither secrets nor "
        "anything of their node.",
    )

    @model_validator(mode="after")
    def _pods_have_no_secrets(self) -> Self:
        spec = mapping_of((self.pod_template or {}).get("spec"))
        check_pod_spec(spec, CONTAINER)
        check_untrusted(spec)
        return self
