"""The digest by which a stored turn knows the prompt that it was sampled after."""

from __future__ import annotations

import hashlib
from array import array


def prompt_digest(rendering: bytes, sampling: bytes, token_ids: array[int]) -> str:
    """Digest of what a trajectory begins with, 16 hexadecimal digits: with another one it must not be continued.

    Args:
        rendering: Of `provenance.rendering_of`.
        sampling: The settings that its responses are sampled with.
        token_ids: Ids of its prompt.
    """
    digest = hashlib.blake2b(rendering, digest_size=8)
    digest.update(len(sampling).to_bytes(8, "little"))
    digest.update(sampling)
    digest.update(token_ids.tobytes())
    return digest.hexdigest()
