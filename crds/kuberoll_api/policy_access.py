"""What environments with access to the policy are given. Their processes import this, so it imports nothing."""

from typing import Final

POLICY_URL: Final = "KUBEROLL_POLICY_URL"
"""Variable with the base URL of the policy's OpenAI-compatible API, with its `/v1`."""

POLICY_TOKEN: Final = "KUBEROLL_POLICY_TOKEN"
"""Variable with a token that can only generate."""

POLICY_VARIABLES: Final = (POLICY_URL, POLICY_TOKEN)


def api_url(url: str) -> str:
    """The base URL of an endpoint's OpenAI-compatible API, from a URL with or without `/v1`."""
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"
