"""A shell of a user's, whose commands are given one by one."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.configuration import REPO

PATIENCE_S = 600


class Shell:
    """One shell: what is exported stays for the next command."""

    def __init__(
        self, folder: Path, variables: Mapping[str, str], exchanged: Mapping[str, str], enter: Sequence[str] = ()
    ) -> None:
        """
        Args:
            folder: where it is, which is also the user's home: Ray keeps its token there.
            variables: further environment variables.
            exchanged: text of a command -> what is given in its place.
            enter: words before each command that has to run elsewhere.
        """
        self._folder, self._exchanged, self._enter = folder, exchanged, tuple(enter)
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # Without what the tests give to clusters of `quartet up`.
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "QUARTET_"))}
        own |= {"HOME": str(folder), "PATH": paths, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        self._environment = own | dict(variables)

    def beside(self, enter: Sequence[str]) -> Self:
        """A shell elsewhere, in which the same has been exported so far."""
        return type(self)(self._folder, self._environment, self._exchanged, enter)

    def run(self, line: str) -> str:
        """Text that the command printed, which has to succeed."""
        after = self._folder / "environment"
        with self.start(f"{self._given(line)} || exit; env -0 >{after}") as process:
            try:
                printed, error = process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
        assert process.returncode == 0, f"{line}: {printed[-3000:]}{error[-3000:]}"
        self._environment = dict(pair.split("=", 1) for pair in after.read_text().split("\0") if "=" in pair)
        return printed

    def start(self, line: str, log: Path | None = None) -> subprocess.Popen[str]:
        """Starts a command, whose text goes to `log`, if that is given."""
        with open(log or os.devnull, "w") as file:
            return subprocess.Popen(
                [*self._enter, "bash", "-c", f"cd {self._folder} && {self._given(line)}"],
                cwd=self._folder,
                env=self._environment,
                stdout=file if log else subprocess.PIPE,
                stderr=subprocess.STDOUT if log else subprocess.PIPE,
                text=True,
            )

    def _given(self, line: str) -> str:
        for old, new in self._exchanged.items():
            line = line.replace(old, new)
        return line
