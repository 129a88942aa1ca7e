"""Errors of images."""

from __future__ import annotations

from kuberoll_workers.environments.interface import Unavailable


class ImageError(Unavailable):
    """An image cannot be had; the message names it, the reason and the way out."""

    reason = "ImageUnavailable"


class ImageRefused(ImageError, ValueError):
    """An image cannot be had, and the next attempt will not have it either."""

    reason = "ImageRefused"


class ImageUnavailable(ImageError):
    """An image cannot be had now; a later attempt may."""


class ReferenceInvalid(ImageRefused):
    """A text names no image."""


class ImageNotFound(ImageRefused):
    """There is no such image."""


class AccessDenied(ImageRefused):
    """A registry does not give the image to whoever asks."""

    reason = "AccessRefused"


class ImageInvalid(ImageRefused):
    """What was found is no image that can be unpacked: damaged, of another kind, or hostile."""


class DigestMismatch(ImageInvalid):
    """A content is not the one that its digest names."""


class PlatformMissing(ImageRefused):
    """The image is for other machines than this one."""


class RegistryUnreachable(ImageUnavailable):
    """A registry does not answer, or says that it cannot now.

    Attributes:
        wait: Seconds after which it wants to be asked again; 0: it says none.
    """

    wait: float = 0.0


class NoSpace(ImageUnavailable):
    """The disk is full, or nearly."""

    reason = "ResourceExhausted"
