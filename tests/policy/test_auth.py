"""Who is let in, and to what."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.contract import SCOPES, SERVERS_TOKEN_VARIABLE, Scope, access_token_variable
from kuberoll_workers.policy.auth import AccessDenied, Tokens, authorize, take_token, take_tokens

TOKENS = Tokens(generate="sample-1234", weights="publish-1234", read="look-1234")
JUDGE = "judge-0123456789"


def status(header: str | None, scope: Scope = "generate", tokens: Tokens | None = TOKENS) -> int:
    """The answer's status; 200: the request passes."""
    try:
        authorize(header, tokens, scope)
    except AccessDenied as denied:
        return denied.status
    return 200


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("Bearer sample-1234", 200),
        ("bearer  sample-1234 ", 200),
        ("Bearer sample-12345", 401),
        ("Bearer sample-123", 401),
        ("Bearer s", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        ("Basic sample-1234", 401),
        ("sample-1234", 401),
        ("", 401),
        (None, 401),
        ("Bearer gehëim", 401),
    ],
)
def test_only_the_token_itself_opens(header: str | None, code: int) -> None:
    assert status(header) == code


@pytest.mark.parametrize("shown", SCOPES)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_token_opens_its_scope_and_reading(shown: Scope, scope: Scope) -> None:
    assert status(f"Bearer {TOKENS.for_scope(shown)}", scope) == (200 if scope in (shown, "read") else 403)


@pytest.mark.parametrize(("scope", "code"), [("generate", 200), ("read", 200), ("weights", 403)])
def test_servers_of_environments_can_only_generate(scope: Scope, code: int) -> None:
    tokens = msgspec.structs.replace(TOKENS, further={SERVERS_TOKEN_VARIABLE: JUDGE})
    assert status(f"Bearer {JUDGE}", scope, tokens) == code
    assert status(f"Bearer {JUDGE}", scope) == 401
    assert status("Bearer sample-1234", "generate", tokens) == 200
    environment = {**tokens.variables(), "PATH": "/bin"}
    assert take_tokens(environment) == tokens
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        (["generate"], {"generate", "read"}),
        (["weights"], {"weights", "read"}),
        (["read"], {"read"}),
        (["generate", "weights"], {"generate", "weights", "read"}),
    ],
)
def test_a_further_token_opens_its_scopes(scopes: list[Scope], allowed: set[Scope]) -> None:
    further = {access_token_variable(scope, "our-trainer"): JUDGE for scope in scopes}
    environment = {**TOKENS.variables(), **{name: f"{token}\n" for name, token in further.items()}, "PATH": "/bin"}
    tokens = take_tokens(environment)
    assert environment == {"PATH": "/bin"}
    assert tokens == msgspec.structs.replace(TOKENS, further=further)
    assert msgspec.json.decode(msgspec.json.encode(tokens), type=Tokens) == tokens
    assert {scope for scope in SCOPES if status(f"Bearer {JUDGE}", scope, tokens) == 200} == allowed
    assert status("Bearer sample-1234", "generate", tokens) == 200


@pytest.mark.parametrize("token", ["", " \n", "short", "15 characters  ", "sixteen with spa ce", "sixteen-letterß-"])
def test_a_further_token_that_is_no_secret_is_refused(token: str) -> None:
    environment = {**TOKENS.variables(), "KUBEROLL_TOKEN_READ_ACCESS_A": token}
    with pytest.raises(ValueError, match="KUBEROLL_TOKEN_READ_ACCESS_A: a token has at least 16 visible") as caught:
        take_tokens(environment)
    assert not token.strip() or token not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("Bearer sample-1234", "this needs the job's token of scope weights; the given one is of scope generate"),
        ("Bearer nothing", "the Authorization header must be: Bearer and one of the job's tokens"),
    ],
)
def test_a_refusal_says_what_is_needed(header: str, message: str) -> None:
    with pytest.raises(AccessDenied) as caught:
        authorize(header, TOKENS, "weights")
    assert str(caught.value) == message


def test_tokens_are_named_and_fixed() -> None:
    """Three texts in a row are easily given in another order, which would open what they are not for."""
    with pytest.raises(TypeError):
        Tokens("sample-1234", "publish-1234", "look-1234")  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        TOKENS.read = TOKENS.weights  # type: ignore[misc]


@given(text=st.text(max_size=12), scope=st.sampled_from(SCOPES))
def test_no_beginning_of_a_token_opens(text: str, scope: Scope) -> None:
    for known in SCOPES:
        token = TOKENS.for_scope(known)
        assert status(f"Bearer {text}", scope) == 401
        for end in range(len(token)):
            assert status(f"Bearer {token[:end]}", scope) == 401


@pytest.mark.parametrize("scope", SCOPES)
def test_the_comparison_takes_the_same_time_whatever_is_shown(monkeypatch: pytest.MonkeyPatch, scope: Scope) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    # It alone decides: what is equal passes no more when it says no.
    assert status(f"Bearer {TOKENS.for_scope(scope)}", scope) == 401
    assert compared == [(TOKENS.for_scope(scope).encode(), TOKENS.for_scope(known).encode()) for known in SCOPES]
    monkeypatch.setattr(hmac, "compare_digest", lambda *_: True)
    assert status("Bearer nothing", scope) == 200


@given(header=st.none() | st.text(), scope=st.sampled_from(SCOPES))
def test_without_tokens_everybody_is_let_in(header: str | None, scope: Scope) -> None:
    authorize(header, None, scope)


def test_tokens_are_taken_out_of_the_environment() -> None:
    environment: dict[str, Any] = {**TOKENS.variables(), "PATH": "/bin"}
    assert take_tokens(environment) == TOKENS
    assert environment == {"PATH": "/bin"}
    assert take_tokens(environment) is None


def test_a_worker_takes_the_one_that_it_needs() -> None:
    environment = {"KUBEROLL_TOKEN_GENERATE": "sample-1234"}
    assert take_token(environment, "generate") == "sample-1234"
    assert (take_token(environment, "generate"), environment) == (None, {})


def test_half_of_the_tokens_are_a_mistake() -> None:
    environment = {"KUBEROLL_TOKEN_GENERATE": "a", "KUBEROLL_TOKEN_READ": ""}
    with pytest.raises(ValueError, match="KUBEROLL_TOKEN_WEIGHTS, KUBEROLL_TOKEN_READ: not set"):
        take_tokens(environment)
