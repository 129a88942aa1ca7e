"""Sandboxes that are containers of an engine on this machine with Docker's API: Docker, or Podman's service.

`engine` finds it, `images` has it hold an image, `body` says what a container is, `sockets` keeps the addresses of the
servers inside, `owners` tells what processes left behind that were killed, and `driver` puts them together.
"""
