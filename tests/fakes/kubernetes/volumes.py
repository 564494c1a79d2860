"""The volumes of a pod as folders of this machine, and its paths as paths in them.

A container has no file system of its own: its mounts stand in a folder, and wherever the pod's texts or the files of
its config maps name a path below one, that folder is put in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from tests.fakes.kubernetes.objects import ApiError, Object, Objects

Translate = Callable[[str], str]
_OWN = ("emptyDir", "ephemeral")
"""Volumes that live as long as their pod."""


class Volumes:
    """The volumes of one pod, below a folder that is the pod's own. `claims` are folders that stay."""

    def __init__(self, pod: Object, objects: Objects, claims: Mapping[str, Path], folder: Path) -> None:
        self._volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
        self._objects = objects
        self._claims = claims
        self._folder = folder

    def mount(self, container: Object, further: Translate) -> Translate:
        """Mount what a container mounts; return how its texts are to be read, `further` included.

        Raises ApiError where a config map or a claim is not there.
        """
        mounts = sorted(container.get("volumeMounts") or [], key=lambda mount: str(mount["mountPath"]))
        root = self._folder / "mounts" / container["name"]
        paths = {str(mount["mountPath"]) for mount in mounts}
        if len(paths) < len(mounts):
            raise ApiError(422, "Invalid", f"a path is mounted twice in {container['name']}: must be unique")
        known = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
        whole = re.compile(rf"(?<![\w./-])(?:{known})(?![\w.-])")

        def translate(text: str) -> str:
            return further(whole.sub(lambda path: f"{root}{path[0]}", text) if paths else text)

        for mount in mounts:
            place = root / PurePosixPath(mount["mountPath"]).relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.is_symlink():
                place.symlink_to(self._source(mount, container["name"], translate))
        return translate

    def _source(self, mount: Object, container: str, translate: Translate) -> Path:
        """Return the folder, or with a `subPath` the file or folder in it, that a mount shows."""
        volume = self._volumes[mount["name"]]
        if "configMap" in volume:
            folder = self._written(volume, container, translate)
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if claim not in self._claims:
                raise ApiError(404, "NotFound", f'persistentvolumeclaim "{claim}" not found')
            folder = self._claims[claim]
        elif any(kind in volume for kind in _OWN):
            folder = self._folder / "volumes" / volume["name"]
            (folder / mount.get("subPath", "")).mkdir(parents=True, exist_ok=True)
        else:
            raise ApiError(422, "Invalid", f"this kubelet does not know {volume}")
        return folder / mount.get("subPath", "")

    def _written(self, volume: Object, container: str, translate: Translate) -> Path:
        """Write the files of a config map as a container sees them."""
        folder = self._folder / "volumes" / f"{volume['name']}-of-{container}"
        folder.mkdir(parents=True, exist_ok=True)
        found = self._objects.get("configmaps", volume["configMap"]["name"])
        for name, text in (found.get("data") or {}).items():
            (folder / name).write_text(translate(text), encoding="utf-8")
        return folder
