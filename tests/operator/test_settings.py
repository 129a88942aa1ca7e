"""Settings of environment variables."""

from __future__ import annotations

import pytest

from kuberoll_operator.settings import InvalidSettings, Settings


def test_variables_are_read_under_what_is_given() -> None:
    environment = {"KUBEROLL_KUEUE": "true", "KUBEROLL_WORKER_IMAGE": "a:1", "KUEUE": "no"}
    settings = Settings.from_environment(environment, worker_image="b:2")
    assert (settings.kueue, settings.worker_image) == (True, "b:2")


def test_a_variable_that_cannot_be_used_is_named() -> None:
    with pytest.raises(InvalidSettings) as refused:
        Settings.from_environment({"KUBEROLL_KUEUE": "/usr/bin/kueue"}, http_port=0)
    assert str(refused.value) == (
        "http_port: Input should be greater than or equal to 1, found 0; environment variable KUBEROLL_KUEUE: Input "
        "should be a valid boolean, unable to interpret input, found '/usr/bin/kueue'"
    )


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(InvalidSettings) as refused:
        Settings.from_environment({}, token_key=["never-shown"])
    assert "token_key" in str(refused.value)
    assert "never-shown" not in str(refused.value)


def test_a_model_cache_is_in_one_place_and_has_a_size_in_bytes() -> None:
    given = {"KUBEROLL_MODEL_CACHE_CLAIM": "models", "KUBEROLL_MODEL_CACHE_SIZE": "1.5Ti"}
    assert Settings.from_environment(given).model_cache_size == 3 << 39
    with pytest.raises(InvalidSettings, match="model_cache_host_path and model_cache_claim: set one of them"):
        Settings.from_environment({**given, "KUBEROLL_MODEL_CACHE_HOST_PATH": "/var/lib/models"})
    for name, value in (("SIZE", "much"), ("SIZE", "0"), ("HOST_PATH", "models"), ("HOST_PATH", "/")):
        with pytest.raises(InvalidSettings, match=f"KUBEROLL_MODEL_CACHE_{name}"):
            Settings.from_environment({f"KUBEROLL_MODEL_CACHE_{name}": value})


def test_a_broker_is_an_address() -> None:
    broker = "http://kuberoll-broker.kuberoll-system.svc:8790"
    assert Settings.from_environment({"KUBEROLL_SANDBOX_BROKER": broker}).sandbox_broker == broker
    assert Settings.from_environment({"KUBEROLL_SANDBOX_BROKER": ""}).sandbox_broker is None
    with pytest.raises(InvalidSettings, match="KUBEROLL_SANDBOX_BROKER"):
        Settings.from_environment({"KUBEROLL_SANDBOX_BROKER": f"{broker}/v1"})
