"""Settings of the broker: those that it shares with the operator, and its limits."""

from __future__ import annotations

from pydantic import Field

from kuberoll_api.sandboxes import BROKER_PORT
from kuberoll_operator.settings import Port, SharedSettings


class BrokerSettings(SharedSettings):
    """Settings of the broker; every field can be set by KUBEROLL_<FIELD>, lists with commas."""

    http_port: Port = Field(default=BROKER_PORT, description="Port of its API, /healthz, /readyz and /metrics.")
    starts: int = Field(default=128, ge=1, description="Sandboxes that may be starting at a time.")
    starts_per_job: int = Field(default=32, ge=1, description="The same of one job.")
