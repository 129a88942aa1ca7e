"""Who is let in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy.auth import admitted


@pytest.mark.parametrize(
    ("header", "fits"),
    [
        ("Bearer secret", True),
        ("bearer  secret ", True),
        ("Bearer secrets", False),
        ("Bearer", False),
        ("Basic secret", False),
        ("secret", False),
        ("", False),
        (None, False),
        ("Bearer gehëim", False),
    ],
)
def test_only_the_token_itself_opens(header: str | None, fits: bool) -> None:
    assert admitted(header, "secret") is fits


@given(st.none() | st.text())
def test_without_a_token_everybody_is_let_in(header: str | None) -> None:
    assert admitted(header, None)
