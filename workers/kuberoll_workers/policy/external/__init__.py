"""Externally managed policies: KubeRoll's own endpoints, SGLang, and any OpenAI-compatible server."""

from kuberoll_workers.policy.external.client import ExternalClient, open_external

__all__ = ["ExternalClient", "open_external"]
