"""What pyproject.toml cannot say: the wheel has copies of launchers, configs, docs and scripts below relayrun/share/.

They lie at the top of the repository, where people look for them, and in the package once it is installed
(`relayrun.places`). An editable installation finds the repository itself.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHARED = (
    "launchers/**/*.sh",
    "launchers/**/*.py",
    "container/*",
    "configs/**/*.yaml",
    "configs/templates/*.py",
    "docs/**/*.md",
    "scripts/tokenization/**/*",
    "scripts/tools/*.py",
)
OWN = ("configs/clusters/test.yaml",)
"""Files of the repository's own tests."""


class BuildWithShared(build_py):
    """Build the package, and put the shared files into it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source, target in self._shared():
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return every file of the build, for the list of what is installed."""
        return [*super().get_outputs(include_bytecode), *(target for _, target in self._shared())]

    def _shared(self) -> list[tuple[str, str]]:
        found = sorted({path for pattern in SHARED for path in Path().glob(pattern) if path.is_file()})
        share = Path(self.build_lib, "relayrun", "share")
        return [
            (str(path), str(share / path))
            for path in found
            if "__pycache__" not in path.parts and path.as_posix() not in OWN
        ]


setup(cmdclass={"build_py": BuildWithShared})
