"""Whose fault it is that there is no usable response."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kuberoll_workers.policy.interface import PolicyRefused, PolicyUnavailable
from kuberoll_workers.serving.engines.faults import fault_of
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine

if TYPE_CHECKING:
    from vllm.v1.engine.exceptions import EngineGenerateError

pytest.importorskip("vllm")


def hidden(cause: Exception) -> EngineGenerateError:
    """An unexpected exception of vLLM's code, as its client passes it on."""
    from vllm.v1.engine.exceptions import EngineGenerateError

    error: EngineGenerateError = EngineGenerateError()
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "cause", [ValueError("bad row"), TypeError("bad row"), KeyError("bad row"), OverflowError("bad row")]
)
def test_what_a_working_engine_cannot_do_with_a_value_is_the_request_s_fault(cause: Exception) -> None:
    from vllm.exceptions import VLLMValidationError

    for error in (cause, hidden(cause), VLLMValidationError("bad row")):
        fault = fault_of(error, dead=None)
        assert isinstance(fault, PolicyRefused)
        assert "bad row" in str(fault)
        # The same words of an engine that is dead say nothing of the request.
        assert isinstance(fault_of(error, dead="killed by signal 9"), PolicyUnavailable)


def test_the_causes_of_a_refusal_are_said() -> None:
    from vllm.exceptions import VLLMValidationError

    error = VLLMValidationError("Invalid grammar specification.")
    error.__cause__ = RuntimeError("Rule root is defined multiple times")
    text = str(fault_of(error, dead=None))
    assert text == "Invalid grammar specification: Rule root is defined multiple times"


def test_no_more_than_three_causes_of_a_refusal_are_said() -> None:
    from vllm.exceptions import VLLMValidationError

    error: BaseException = ValueError("cause 4")
    for number in (3, 2, 1):
        outer = VLLMValidationError(f"cause {number}")
        outer.__cause__ = error
        error = outer
    assert isinstance(error, Exception)
    assert str(fault_of(error, dead=None)) == "cause 1: cause 2: cause 3"


def test_what_a_request_gets_of_an_engine_that_is_gone_is_not_its_fault() -> None:
    # Such as while it is shut down.
    engine = VLLMEngine(model="none", tokenizer="none", revision=None, engine_args={})
    error = hidden(ValueError("bad row"))
    fault = fault_of(error, dead=engine._dead(error))
    assert isinstance(fault, PolicyUnavailable)
    assert "EngineGenerateError" in str(fault)


def test_full_queues_and_what_may_be_tried_again_are_the_engine_s() -> None:
    from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError, RetryableRequestError
    from vllm.v1.engine.exceptions import EngineDeadError

    errors = [QueueOverflowError(), MaxQueuedTokensError(), RetryableRequestError(), EngineDeadError()]
    for error in (*errors, hidden(OSError("no buffer space")), hidden(RuntimeError("out of memory"))):
        assert isinstance(fault_of(error, dead=None), PolicyUnavailable)
