"""The APIs of OpenAI and Anthropic over a replica's engine, by vLLM's own API server parts."""

from kuberoll_workers.serving.openai_api.routes import OpenAIRoutes

__all__ = ["OpenAIRoutes"]
