"""The container that ranks and other programs run in, as options of srun or as a command before the program.

container: {runtime: pyxis, image: /images/pytorch.sqsh, mounts: [/scratch, /data:/mnt:ro]}
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from relayrun.config.sections.base import Section, SingleLine
from relayrun.errors import ConfigError

Mount = Annotated[SingleLine, Field(pattern=r"^/[^,:]*(:/[^,:]*(:(ro|rw))?)?$")]


class ContainerSection(Section):
    """The container of the ranks, and of every other program of a job but the batch script and its supervisor."""

    runtime: Literal["none", "pyxis", "edf", "apptainer"] = "none"
    """`pyxis`: srun's plugin for enroot. `edf`: srun's `--environment` (CSCS), a file or its name. `apptainer`: a
    command before the program."""
    image: SingleLine | None = None
    """`pyxis`: a squashfs file, or a name as enroot takes it. `edf`: the file, or its name in the search path.
    `apptainer`: a .sif file, a folder, or docker://NAME."""
    mounts: list[Mount] = []
    """Folders of the host in the container: `/path`, `/path:/inside`, `/path:/inside:ro`. With `edf`: in its file.
    The folder of relayrun and the run directory are always mounted; data, tokenizers and Python's packages are not."""
    workdir: Annotated[SingleLine, Field(pattern=r"^/")] | None = None
    """Working directory in the container. With `edf`: in its file."""
    writable: bool = False
    """Programs may write into the image's own folders; what they write there is lost. With `edf`: in its file."""
    mount_home: bool = False
    """The home directory is the host's. With `edf`: in its file."""
    gpus: Literal["nvidia", "rocm", "none"] = "nvidia"
    """For `apptainer`: whose libraries of the host it brings in (`--nv`, `--rocm`)."""
    options: list[SingleLine] = []
    """Further options: of srun for `pyxis` and `edf`, of `apptainer exec` for `apptainer`."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        given = {name for name, field in ContainerSection.model_fields.items() if getattr(self, name) != field.default}
        if self.runtime == "none":
            if given:
                raise ValueError(f"{sorted(given)[0]} belongs to a container; set runtime to pyxis, edf or apptainer")
            return self
        if self.image is None:
            raise ValueError(f"runtime {self.runtime} needs an image")
        in_the_file = given & {"mounts", "workdir", "writable", "mount_home"}
        if self.runtime == "edf" and in_the_file:
            raise ValueError(f"{sorted(in_the_file)[0]} belongs into the environment definition file {self.image}")
        if self.runtime != "apptainer" and "gpus" in given:
            raise ValueError("gpus is a setting of runtime apptainer; srun's plugins find the GPUs themselves")
        return self

    @property
    def srun_options(self) -> list[str]:
        """What the container adds to srun."""
        if self.runtime == "edf":
            return [f"--environment={self.image}", *self.options]
        if self.runtime != "pyxis":
            return []
        found = [f"--container-image={self.image}"]
        if self.mounts:
            found.append(f"--container-mounts={','.join(_mount_sides(mount) for mount in self.mounts)}")
        if self.workdir is not None:
            found.append(f"--container-workdir={self.workdir}")
        found.append("--container-mount-home" if self.mount_home else "--no-container-mount-home")
        found.append("--container-writable" if self.writable else "--container-readonly")
        return found + self.options

    @property
    def command(self) -> list[str]:
        """What the container puts before a program."""
        if self.runtime != "apptainer":
            return []
        assert self.image is not None
        flags = {"nvidia": ["--nv"], "rocm": ["--rocm"], "none": []}[self.gpus]
        if not self.mount_home:
            flags.append("--no-home")
        if self.writable:
            flags.append("--writable-tmpfs")
        binds = [word for mount in self.mounts for word in ("--bind", mount)]
        workdir = [] if self.workdir is None else ["--pwd", self.workdir]
        return ["apptainer", "exec", *flags, *binds, *workdir, *self.options, self.image]

    def with_mounts(self, paths: Iterable[str]) -> ContainerSection:
        """This container with these folders of the host, but for those that lie in one of its mounts already."""
        if self.runtime not in ("pyxis", "apptainer"):
            return self
        mounts = list(self.mounts)
        for path in sorted(set(paths)):
            if not any(_mount_shows(mount, path) for mount in mounts):
                mounts.append(_checked_mount(path))
        return self.model_copy(update={"mounts": mounts})


def _mount_shows(mount: str, path: str) -> bool:
    """Whether the container has `path` by its own name because of `mount`."""
    source, _, rest = mount.partition(":")
    same = source.rstrip("/") == (rest.partition(":")[0] or source).rstrip("/")
    return same and PurePath(path).is_relative_to(source)


def _checked_mount(path: str) -> str:
    if "," in path or ":" in path:
        raise ConfigError("a path with a comma or a colon cannot be mounted in a container", where=path)
    return path


def _mount_sides(mount: str) -> str:
    """As pyxis takes a mount: SOURCE:DESTINATION[:FLAGS]."""
    return mount if ":" in mount else f"{mount}:{mount}"
