"""Who runs in a machine, and what the machine may reach meanwhile: what tables of task.toml have in common."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from kuberoll_workers.harbor.hosts import normal_hosts
from kuberoll_workers.harbor.tables import Table, User

NetworkMode = Literal["no-network", "public", "allowlist"]


class Network(Table):
    """What a machine may reach.

    Attributes:
        mode: `no-network`, `public`, or `allowlist`: only `hosts`.
    """

    mode: NetworkMode = "public"
    hosts: list[str] = Field(default_factory=list)


class Hosts(Table):
    """A table with an allowlist."""

    allowed_hosts: Annotated[list[str], AfterValidator(normal_hosts)] | None = None

    def check_hosts(self, mode: NetworkMode | None, *, given: bool) -> None:
        """Check that hosts are given only where they count.

        Raises:
            ValueError: They are not.
        """
        if given and mode != "allowlist":
            raise ValueError('allowed_hosts is only for network_mode = "allowlist": set that, or remove the hosts')


class Phase(Hosts):
    """Who runs in a machine, and what the machine may reach meanwhile.

    Attributes:
        network_mode: None: what the machine may reach at all times.
    """

    network_mode: NetworkMode | None = None
    user: User | None = None

    @model_validator(mode="after")
    def _hosts_of_a_list(self) -> Self:
        hosts = self.allowed_hosts
        # An empty list means something only with a mode.
        self.check_hosts(self.network_mode, given=hosts is not None if self.network_mode is None else bool(hosts))
        return self

    @property
    def network(self) -> Network | None:
        if self.network_mode is None:
            return None
        return Network(mode=self.network_mode, hosts=list(self.allowed_hosts or ()))
