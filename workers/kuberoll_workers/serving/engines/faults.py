"""Who is at fault when vLLM has no usable response to a request: the request itself, or the engine.

The rule: what an engine that goes on working says of one request is that request's fault, with the engine's own words.
Only death, overload, and what vLLM itself calls retryable are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kuberoll_workers.policy.interface import PolicyError, PolicyRefused, PolicyUnavailable

# What Python's own and vLLM's code raises over a value that it did not expect. vLLM hides it in an EngineGenerateError.
_OF_VALUES: Final = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    RecursionError,
)

_OTHER_BACKEND: Final = (
    "; spec.generation.engineArgs.structured_outputs_config: {backend: guidance} chooses vLLM's other implementation"
)


def fault_of(error: Exception, *, dead: str | None) -> PolicyError:
    """The policy's error for an exception of vLLM's client.

    Args:
        dead: What is known of the engine's death; None: it works.

    Returns:
        PolicyRefused if the request is at fault, PolicyUnavailable if the engine is.
    """
    from vllm.exceptions import VLLMClientError, VLLMError
    from vllm.v1.engine.exceptions import EngineGenerateError

    if dead is not None:
        return PolicyUnavailable(dead)
    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, _OF_VALUES):
        return PolicyRefused(_words(error.__cause__))
    if isinstance(error, VLLMClientError) or (isinstance(error, _OF_VALUES) and not isinstance(error, VLLMError)):
        return PolicyRefused(_words(error))
    return PolicyUnavailable(f"{type(error).__name__}: {error}")


def _words(error: BaseException) -> str:
    text = ": ".join(_chain(error)) or type(error).__name__
    return f"{text}{_OTHER_BACKEND}" if "xgrammar" in text.lower() else text


def _chain(error: BaseException) -> Iterator[str]:
    """The message of an exception, and those of its causes that say more."""
    said = ""
    found: BaseException | None = error
    for _ in range(3):
        if found is None:
            return
        text = str(found).strip().rstrip(".")
        if text and text not in said:
            said += text
            yield text
        found = found.__cause__
