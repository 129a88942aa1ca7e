"""Variables by which programs find the proxy; tests/sandboxes/egress/test_clients.py has the programs."""

from __future__ import annotations

from kuberoll_workers.sandboxes.egress.variables import variables


def test_all_lead_to_the_proxy_but_for_loopback() -> None:
    found = variables(3128)
    assert {name for name, value in found.items() if value == "http://127.0.0.1:3128"} == {
        *("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "YARN_HTTP_PROXY", "YARN_HTTPS_PROXY")
    }
    assert found["NO_PROXY"] == found["no_proxy"] == "localhost,127.0.0.1,::1"
    # Yarn ends with an error at one that it does not know.
    assert sum(name.startswith("YARN_") for name in found) == 2
