"""Images in files that `docker save` and `podman save` write: a tar with `manifest.json`.

Its layers are read where they are, without a copy.
"""

from __future__ import annotations

import json
import tarfile
from contextlib import AbstractContextManager
from typing import Any, Final

from kuberoll_workers.sandboxes.images.errors import ImageInvalid, ImageNotFound, ReferenceInvalid
from kuberoll_workers.sandboxes.images.manifests import MAX_BYTES, digest_of, parse_config, this_platform
from kuberoll_workers.sandboxes.images.references import ArchiveReference, complete
from kuberoll_workers.sandboxes.images.sources import Found, LocalSource, StoredLayer, part_of, sized

_COMPRESSED: Final = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd"}
_MAX_MEMBERS: Final = 100_000
_MAX_LINKS: Final = 10


class ArchiveSource(LocalSource):
    """An image in an archive."""

    def __init__(self, reference: ArchiveReference) -> None:
        self._reference = reference
        self._where = f"image {reference}"
        self._members: dict[str, tarfile.TarInfo] = {}

    def state(self) -> str | None:
        """The file's identity: it is too large to be read each time."""
        try:
            found = self._reference.file.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            hint = "`docker save NAME -o FILE` and `podman save NAME -o FILE` write one"
            raise ImageNotFound(f"{self._where}: there is no such file; {hint}") from error
        return f"{found.st_dev}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}"

    def find(self) -> Found:
        """What the archive has by this name."""
        self.state()
        try:
            with self._reference.file.open("rb") as file:
                start = file.read(4)
                for magic, program in _COMPRESSED.items():
                    if start.startswith(magic):
                        raise ImageInvalid(f"{self._where}: it is compressed: {program} it first")
                file.seek(0)
                with tarfile.open(fileobj=file, mode="r:") as archive:
                    return self._read(archive)
        except IsADirectoryError as error:
            raise ImageInvalid(f"{self._where}: it is a directory: name an OCI layout oci:DIRECTORY") from error
        except (tarfile.TarError, ValueError, IndexError, EOFError) as error:
            if isinstance(error, ImageInvalid | ImageNotFound | ReferenceInvalid):
                raise
            raise ImageInvalid(f"{self._where}: no tar archive, or damaged: {error}") from error

    def layer(self, name: str) -> AbstractContextManager[StoredLayer]:
        """A layer, by its member's name."""
        member = self._member(name)
        return part_of(self._reference.file, member.offset_data, member.size, None)

    def _read(self, archive: tarfile.TarFile) -> Found:
        for member in archive:
            self._members[member.name.removeprefix("./")] = member
            if len(self._members) > _MAX_MEMBERS:
                raise ImageInvalid(f"{self._where}: more than {_MAX_MEMBERS} members")
        if "manifest.json" not in self._members:
            hint = "no archive of `docker save`"
            if "index.json" in self._members:
                hint = "an OCI archive: unpack it (tar -xf) into a directory, and name it oci:DIRECTORY"
            raise ImageInvalid(f"{self._where}: it has no manifest.json: {hint}")
        try:
            images = json.loads(self._content(archive, "manifest.json"))
            image = self._choose(images)
            content = self._content(archive, str(image["Config"]))
            layers = tuple(str(name) for name in image["Layers"] or ())
        except (KeyError, TypeError, AttributeError) as error:
            raise ImageInvalid(f"{self._where}: manifest.json is not that of `docker save`: {error!r}") from error
        config = parse_config(content, self._where, this_platform())
        for name in layers:
            self._member(name)
        return sized(Found(digest_of(content), config, layers), self._where)

    def _choose(self, images: list[dict[str, Any]]) -> dict[str, Any]:
        wanted = self._reference.name
        named = [(self._names(image), image) for image in images]
        found = [image for names, image in named if wanted is None or wanted in names]
        if len(found) == 1:
            return found[0]
        there = ", ".join(sorted({name for names, _ in named for name in names})) or "none with names"
        if not found:
            raise ImageNotFound(f"{self._where}: there is none of this name, but {there}")
        raise ImageNotFound(f"{self._where}: there are several: name one, as in docker-archive:FILE:NAME: {there}")

    @staticmethod
    def _names(image: dict[str, Any]) -> set[str]:
        names = set()
        for name in image.get("RepoTags") or ():
            try:
                names.add(complete(str(name)))
            except ReferenceInvalid:
                continue
        return names

    def _content(self, archive: tarfile.TarFile, name: str) -> bytes:
        member = self._member(name)
        if member.size > MAX_BYTES:
            raise ImageInvalid(f"{self._where}: {name} has more than {MAX_BYTES} bytes")
        file = archive.extractfile(member)
        assert file is not None
        return file.read()

    def _member(self, name: str) -> tarfile.TarInfo:
        """A file, which may be stored once for several layers, with symbolic links."""
        place = name
        for _ in range(_MAX_LINKS):
            if (member := self._members.get(place)) is None:
                break
            if member.isreg() and not member.issparse():
                return member
            if member.islnk():
                place = member.linkname
            elif member.issym():
                parts: list[str] = place.split("/")[:-1]
                for part in member.linkname.split("/"):
                    parts = parts[:-1] if part == ".." else [*parts, part]
                place = "/".join(parts)
            else:
                break
        raise ImageInvalid(f"{self._where}: the archive lacks {name!r:.200}: save the image again")
