"""Variables by which programs in a machine find its proxy."""

from __future__ import annotations

from typing import Final

_DIRECT: Final = "localhost,127.0.0.1,::1"


def variables(port: int) -> dict[str, str]:
    """Variables of programs in a machine whose only way out is an HTTP proxy at a port of its loopback.

    curl, and with it git and cargo, take http_proxy in lower case only; others know the upper case only. pip, uv, npm,
    pnpm, apt, apk, Go, Ruby and wget need no more.
    """
    proxy = f"http://127.0.0.1:{port}"
    return {
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), _DIRECT),
        # Node's own fetch, http and https, from 22.21 and 24.5 on; older ones have no way but a program's own.
        "NODE_USE_ENV_PROXY": "1",
        # Yarn from 2 on reads no others, and refuses variables YARN_... that are none of its settings.
        **dict.fromkeys(("YARN_HTTP_PROXY", "YARN_HTTPS_PROXY"), proxy),
    }
