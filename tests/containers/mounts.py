"""A pod's volumes as the kubelet makes them on its node: directories, in-memory file systems, owners and modes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.scheduling import quantities
from tests.cluster.volumes import Find, NotYet, data_of, downward
from tests.containers.containerd import cri

Object = dict[str, Any]
Token = Callable[[Object], Awaitable[dict[str, bytes]]]
"""Gives the contents of `projected` sources that only the cluster has: a service account's token and its authority."""

_READ_ONLY = ("configMap", "secret", "downwardAPI", "projected")


@dataclass(slots=True)
class PodVolumes:
    """The volumes of one pod.

    Attributes:
        root: Directory that the pod alone has.
        claims: Directory of the namespace's claims, each one a directory that pods share.
        address: Of the pod.
    """

    pod: Object
    root: Path
    claims: Path
    address: str
    hosts: Mapping[str, str] = field(default_factory=dict)
    _places: dict[str, Path] = field(default_factory=dict)
    _mounted: list[Path] = field(default_factory=list)

    async def make(self, find: Find) -> None:
        """Makes all of them, again where they are there: what they show is as it is now.

        Raises:
            NotYet: A ConfigMap, Secret or claim is not there.
        """
        group = self.pod["spec"].get("securityContext", {}).get("fsGroup")
        for volume in self.pod["spec"].get("volumes", ()):
            name = volume["name"]
            known = name in self._places
            place = self._places.setdefault(name, self.root / "volumes" / name)
            if "emptyDir" in volume and not known:
                self._empty(place, volume["emptyDir"], group)
            elif "hostPath" in volume:
                self._places[name] = Path(volume["hostPath"]["path"])
            elif claim := volume.get("persistentVolumeClaim"):
                self._places[name] = self._claim(claim["claimName"], group)
            elif any(kind in volume for kind in _READ_ONLY):
                write_contents(place, await self._contents(volume, find), group)

    def _empty(self, place: Path, source: Object, group: int | None) -> None:
        place.mkdir(parents=True)
        if source.get("medium") == "Memory":
            size = quantities({"size": source["sizeLimit"]})["size"] if "sizeLimit" in source else None
            options = "mode=0777" if size is None else f"mode=0777,size={int(size)}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
            self._mounted.append(place)
        place.chmod(0o777)
        _give(place, group)

    def _claim(self, name: str, group: int | None) -> Path:
        place = self.claims / name
        if not place.exists():
            place.mkdir(parents=True)
            # As most provisioners make them: only root may write, until fsGroup says who else.
            place.chmod(0o755)
        if group is not None and place.stat().st_gid != group:
            for item in (place, *place.rglob("*")):
                _give(item, group)
        return place

    async def _contents(self, volume: Object, find: Find) -> dict[str, tuple[bytes, int]]:
        source = volume.get("projected") or next(volume[kind] for kind in _READ_ONLY if kind in volume)
        mode = source.get("defaultMode", 0o644)
        parts = volume["projected"]["sources"] if "projected" in volume else [volume]
        found: dict[str, tuple[bytes, int]] = {}
        for part in parts:
            found |= {path: (content, mode) for path, content in (await self._part(volume, part, find)).items()}
        return found

    async def _part(self, volume: Object, part: Object, find: Find) -> dict[str, bytes]:
        if "downwardAPI" in part:
            items = part["downwardAPI"]["items"]
            return {item["path"]: downward(self.pod, item["fieldRef"]["fieldPath"]).encode() for item in items}
        if token := part.get("serviceAccountToken"):
            item = await find("ServiceAccountToken", self.pod["spec"].get("serviceAccountName", "default"))
            if item is None:
                raise NotYet(f'MountVolume.SetUp failed for volume "{volume["name"]}": no token of the service account')
            return {token["path"]: data_of(item)["token"]}
        for kind, key, named in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
            if (given := part.get(key)) is None:
                continue
            name = given.get(named) or given.get("name")
            item = await find(kind, name)
            if item is None:
                if given.get("optional"):
                    return {}
                raise NotYet(f'MountVolume.SetUp failed for volume "{volume["name"]}": {kind} "{name}" not found')
            paths = {entry["key"]: entry["path"] for entry in given.get("items", ())}
            data = data_of(item)
            return {paths[key]: data[key] for key in paths} if paths else data
        raise NotYet(f"the test kubelet knows no volume {volume['name']} of {', '.join(part)}")

    def mounts(self, container: Object, termination_log: Path) -> list[Any]:
        """What is mounted in a container: its volumes, its termination log and /etc/hosts."""
        kinds = {volume["name"]: volume for volume in self.pod["spec"].get("volumes", ())}
        found = []
        for mount in container.get("volumeMounts", ()):
            volume = kinds[mount["name"]]
            claim = volume.get("persistentVolumeClaim", {})
            read_only = bool(
                mount.get("readOnly") or claim.get("readOnly") or any(kind in volume for kind in _READ_ONLY)
            )
            place = self._places[mount["name"]] / mount.get("subPath", "")
            if mount.get("subPath") and not place.exists():
                place.mkdir(parents=True)
            found.append(cri.Mount(container_path=mount["mountPath"], host_path=str(place), readonly=read_only))
        termination_log.write_bytes(b"")
        # Whoever the container runs as writes to it.
        termination_log.chmod(0o666)
        path = container.get("terminationMessagePath", "/dev/termination-log")
        found.append(cri.Mount(container_path=path, host_path=str(termination_log)))
        if all(mount.container_path != "/etc/hosts" for mount in found):
            found.append(cri.Mount(container_path="/etc/hosts", host_path=str(self._hosts())))
        return found

    def _hosts(self) -> Path:
        file = self.root / "hosts"
        lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost ip6-loopback"]
        lines.append(f"{self.address}\t{self.pod['metadata']['name']}")
        aliases = self.pod["spec"].get("hostAliases", ())
        lines.extend("\t".join([alias["ip"], *alias["hostnames"]]) for alias in aliases)
        file.write_text("\n".join(lines) + "\n")
        file.chmod(0o644)
        return file

    def clean_up(self) -> None:
        """Removes what the pod alone has."""
        for place in self._mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=False)
        self._mounted.clear()
        shutil.rmtree(self.root, ignore_errors=True)


def write_contents(place: Path, contents: Mapping[str, tuple[bytes, int]], group: int | None) -> None:
    """Writes files as the kubelet does, all at once: links to `..data`, which is a link that is replaced."""
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o777)
    previous = (place / "..data").readlink() if (place / "..data").is_symlink() else None
    if previous is not None:
        there = place / previous
        if {str(file.relative_to(there)): file.read_bytes() for file in there.rglob("*") if file.is_file()} == {
            path: content for path, (content, _) in contents.items()
        }:
            return
    number = 1 + max((int(item.name.rpartition("_")[2]) for item in place.glob("..at_*")), default=0)
    version = place / f"..at_{number}"
    for path, (content, mode) in contents.items():
        file = version / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
        _give(file, group)
    version.mkdir(exist_ok=True)
    version.chmod(0o755)
    link = place / "..data_new"
    link.symlink_to(version.name)
    link.rename(place / "..data")
    for name in {path.partition("/")[0] for path in contents}:
        if not (place / name).is_symlink():
            (place / name).symlink_to(f"..data/{name}")
    if previous is not None:
        shutil.rmtree(place / previous)


def _give(place: Path, group: int | None) -> None:
    """To the pod's group, as fsGroup says: group-readable and -writable; directories hand it on."""
    if group is None or place.is_symlink():
        return
    os.chown(place, -1, group)
    mode = place.stat().st_mode
    place.chmod(mode | 0o660 | (0o2110 if place.is_dir() else 0))
