"""Images of sandboxes that pods cannot have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kuberoll_api.model.sandboxes import Sandbox

# A registry may be called `host`, and have a port.
_OF_ONE_MACHINE: Final = ("oci:", "docker-archive:", "host:/")


def is_of_one_machine(image: str) -> bool:
    """True for an image that is in no registry."""
    return image.startswith(_OF_ONE_MACHINE)


def unpullable(sandbox: Sandbox) -> Iterator[tuple[str, str]]:
    """Fields of a sandbox that name what only one machine has, each with the reason and the remedy."""
    for field, image in (("image", sandbox.image), ("builtImages", sandbox.built_images)):
        if image is not None and is_of_one_machine(image):
            yield (
                field,
                f"{image} is on the disk of one machine, and pods pull their images from registries; name one that is "
                "in a registry (`kuberoll images build --push` brings those of tasks there)",
            )
