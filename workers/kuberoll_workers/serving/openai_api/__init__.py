"""The OpenAI-compatible API of the Serve app: chat completions, completions, models."""

from kuberoll_workers.serving.openai_api.routes import OpenAIRoutes

__all__ = ["OpenAIRoutes"]
