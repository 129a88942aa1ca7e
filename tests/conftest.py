"""What all tests share."""

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine the clock says nothing about the code.
settings.register_profile("kuberoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kuberoll")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="Run the tests that take a minute or more, too.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if "long" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="takes a minute or more: make test-long"))
