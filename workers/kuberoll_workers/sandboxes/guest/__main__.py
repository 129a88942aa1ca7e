"""Entry point of the server inside a sandbox."""

from .server import main
from .settings import from_variable

main(from_variable())
