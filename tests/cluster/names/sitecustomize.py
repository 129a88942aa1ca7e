"""DNS of a headless Service for pods that are processes, whose pods come and go; Python imports it at its start.

What processes read has addresses in the place of names: that of one of its pods for a headless Service. A program that
asks for the addresses of an address means such a name.
"""

import os
import socket
from pathlib import Path
from typing import Any

_FILE = Path(os.environ["KUBEROLL_TEST_NAMES"])
_getaddrinfo = socket.getaddrinfo


def _addresses(host: Any, *arguments: Any, **options: Any) -> Any:
    if not str(host).replace(".", "").isdecimal():
        return _getaddrinfo(host, *arguments, **options)
    ready = _FILE.read_text().split() if _FILE.exists() else []
    if not ready:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [found for address in ready for found in _getaddrinfo(address, *arguments, **options)]


socket.getaddrinfo = _addresses
