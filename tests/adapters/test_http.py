"""Errors of other libraries' servers: which are those of a server that cannot answer now."""

from __future__ import annotations

import pytest

from kuberoll_workers.adapters.http import Answer
from kuberoll_workers.data.causes import Cause, Evidence
from kuberoll_workers.environments.exception_causes import cause_of


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_a_server_that_cannot_answer_now(status: int) -> None:
    error = Answer(url="http://server/step", status=status, body=b"later", cookies={}).error()
    assert cause_of(error) == Cause("EnvironmentUnreachable", Evidence(http_status=status))
    assert str(error) == f"http://server/step answered {status}: later"


@pytest.mark.parametrize("status", [400, 404, 500, 501])
def test_a_server_whose_code_failed_or_that_refuses(status: int) -> None:
    error = Answer(url="http://server/step", status=status, body=b"KeyError", cookies={}).error()
    assert cause_of(error) == Cause("EnvironmentRaised")
