"""Pages that are walked as they stand: their files are written, their commands given one after the other."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from orchestrator.deployment.listeners import free_ports
from tests.configuration import REPO


@dataclass(frozen=True, slots=True)
class Page:
    """The files and commands of a page."""

    files: Mapping[str, str]
    """Name -> contents, of each block of code below its file's name."""
    commands: tuple[str, ...]
    """The lines behind a `$`, in order."""

    @classmethod
    def at(cls, name: str) -> Self:
        """The page in docs/."""
        text = (REPO / "docs" / name).read_text()
        files = re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        return cls(dict(files), tuple(re.findall(r"^\$ (.+)$", text, re.MULTILINE)))

    def write(self, folder: Path) -> None:
        """Writes the files."""
        for name, text in self.files.items():
            (folder / name).write_text(text)


def told_metrics() -> re.Pattern[str]:
    """A pattern of the metrics that docs/metrics.md tells of."""
    rows = re.findall(r"^\| (`.+?) \| ", (REPO / "docs/metrics.md").read_text(), re.MULTILINE)
    names = [re.escape(name) for row in rows for name in re.findall("`([^`]+)`", row)]
    names += [f"{name}_(?:low|high)" for name in names if name.startswith("eval/")]
    return re.compile("|".join(re.sub("<[a-z]+>", "[^/]+", name) for name in names))


def shell(folder: Path, line: str, **environment: str) -> None:
    """Gives one command in the folder; the test fails with all that it said if it fails."""
    bin_folder = str(Path(sys.executable).parent)
    own = {"PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]), "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=os.environ | own | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def shorten(file: Path, steps: int) -> None:
    """Fewer steps in a file of `quartet init`, and ports that are free where tests run."""
    text = file.read_text()
    http, grpc_port = free_ports(2)
    for old, new in (
        ("# http_port: 18000", f"http_port: {http}"),
        ("# port: 19000", f"port: {grpc_port}"),
        ("# steps: 100 ", f"steps: {steps} "),
    ):
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
