"""The file in a run's directory by which a trainer on the same machine finds the policy's endpoint while it runs."""

from __future__ import annotations

from typing import Final

import msgspec

POLICY_FILE: Final = "policy.json"


class PolicyFile(msgspec.Struct, kw_only=True, frozen=True):
    """Content of the file, as JSON.

    Attributes:
        url: Base URL of the policy.
        tokens: Path of a file with its tokens by scope, which only the user of the run can read.
    """

    url: str
    tokens: str
