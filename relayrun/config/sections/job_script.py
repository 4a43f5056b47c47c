"""Settings that become part of a job script: options of sbatch, setup lines and the container of its programs."""

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from relayrun.config.sections.base import Section
from relayrun.config.sections.batch_systems import SETTINGS_INSTEAD
from relayrun.config.sections.dataclass_section import SingleLine, one_line
from relayrun.errors import ConfigError

Mount = Annotated[SingleLine, Field(pattern=r"^/[^,:]*(:/[^,:]*(:(ro|rw))?)?$")]


class ContainerSection(Section):
    """The container of the ranks, and of every other program of a job except the batch script and its supervisor."""

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
    """For `apptainer`: vendor of the GPUs, whose host libraries it binds (`--nv`, `--rocm`)."""
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
        """Return the container's options of srun."""
        if self.runtime == "edf":
            return [f"--environment={self.image}", *self.options]
        if self.runtime != "pyxis":
            return []
        found = [f"--container-image={self.image}"]
        if self.mounts:  # pyxis takes SOURCE:DESTINATION[:FLAGS] alone
            mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in self.mounts]
            found.append(f"--container-mounts={','.join(mounts)}")
        if self.workdir is not None:
            found.append(f"--container-workdir={self.workdir}")
        found.append("--container-mount-home" if self.mount_home else "--no-container-mount-home")
        found.append("--container-writable" if self.writable else "--container-readonly")
        return found + self.options

    @property
    def command(self) -> list[str]:
        """Return the container's words before a program."""
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

    def with_mounts(self, paths: Iterable[str]) -> Self:
        """Return this container with further folders of the host, except those in its mounts."""
        if self.runtime not in ("pyxis", "apptainer"):
            return self
        mounts = list(self.mounts)
        for path in sorted(set(paths)):
            if any(_mount_shows(mount, path) for mount in mounts):
                continue
            if "," in path or ":" in path:
                raise ConfigError("a path with a comma or a colon cannot be mounted in a container", where=path)
            mounts.append(path)
        return self.model_copy(update={"mounts": mounts})


def _mount_shows(mount: str, path: str) -> bool:
    """True if `mount` shows `path` in the container under the same name."""
    source, _, rest = mount.partition(":")
    same = source.rstrip("/") == (rest.partition(":")[0] or source).rstrip("/")
    return same and PurePath(path).is_relative_to(source)


SbatchValue = bool | int | str
"""`true`: the option without a value; `false`: cancel this option of the site's file."""


def _checked_sbatch_options(options: dict[str, SbatchValue]) -> dict[str, SbatchValue]:
    for name, value in options.items():
        if not _SBATCH_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no long name of an option of sbatch, as in mail-type")
        if name in SETTINGS_INSTEAD:
            raise ValueError(f"{name} is relayrun's own: {SETTINGS_INSTEAD[name]}")
        if value == "":
            raise ValueError(f"{name} has no value; write `true` for an option without one")
        if isinstance(value, str):
            one_line(value)
    return options


_SBATCH_NAME = re.compile(r"[a-z][a-z0-9-]*")

SbatchOptions = Annotated[dict[str, SbatchValue], AfterValidator(_checked_sbatch_options)]


def sbatch_script_options(given: Mapping[str, SbatchValue]) -> dict[str, str | None]:
    """Return the options in the job's script with their values; None: without a value."""
    return {name: None if value is True else str(value) for name, value in given.items() if value is not False}


def check_setup_lines(lines: Sequence[str], *, where: str) -> None:
    """Raise ConfigError, with Bash's message, for lines that are not valid Bash. The lines are not executed."""
    if not lines:
        return
    text = "\n".join(lines) + "\n"
    read = subprocess.run(["bash", "-n", "-s"], input=text, capture_output=True, text=True, check=False)
    if read.returncode:
        said = read.stderr.strip().splitlines()[0].partition(": ")[2]
        raise ConfigError(f"Bash cannot read these lines: {said}", where=where, hint="each line is one of a script")
