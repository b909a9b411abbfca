"""Parts for a machine without a registry: what they hold, and that they install there, checked, in any order."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import read
from benchmarks.lent.pack import Packing, pack, told
from benchmarks.lent.wheels import read_image, strip
from tests.lock import read as read_lock

ROOT = Path(__file__).parents[3]
STAGES = """
from benchmarks.lent.table import Stage
STAGES = (Stage("large", "uses_large", (), (), 1, 60, needs=("large",)),)
"""
STAGE = """
import large
from importlib.metadata import entry_points
from benchmarks.figures import keep
points = {point.name for point in entry_points(group="vllm.general_plugins")}
keep("large", {"size": large.SIZE, "plugin": "quartet" in points})
"""
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "quartet-ppo"
version = "0.1.0"
dependencies = ["small>=1", "there>=2", "kept>=9"]
optional-dependencies = {engine = ["large; python_version >= '3'", "windows; sys_platform == 'win32'"]}
[project.entry-points."vllm.general_plugins"]
quartet = "services.plugin:register"
[tool.hatch.build.targets.wheel]
packages = ["services"]
"""

KERNELS = random.Random(1).randbytes(8 << 10) * 200
"""A large file that shrinks."""


def wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes], *needs: str) -> Path:
    """A wheel with these files, that asks for these packages."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in needs]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in files.items():
            archive.writestr(file, data)
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def line(path: Path) -> str:
    """The line of a lock for a wheel."""
    name, version, *_ = path.name.split("-")
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packing:
    """A small project and a folder of wheels in the place of a registry."""
    house = tmp_path / "house"
    house.mkdir()
    noise = random.Random(0).randbytes(3 << 20)
    large = {"large/__init__.py": f"SIZE = {len(noise)}".encode(), "large/data": noise, "large/unused.so": noise}
    large |= {"large/kernels": KERNELS}
    wheels = [
        wheel(house, "small", "1.5", {"small.py": b"ANSWER = 42"}, "common"),
        wheel(house, "common", "1.0", {"common.py": b""}),
        wheel(house, "large", "2.0", large, "common", "there>=3", "codec", "small[more]"),
        wheel(house, "there", "3.1", {"there.py": b""}),
    ]
    lock, image = tmp_path / "lock.txt", tmp_path / "image.txt"
    lock.write_text("".join(map(line, wheels)))
    image.write_text("there==2.5\nkept==1.0 keep\n")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(house), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("benchmarks.lent.wheels.LEFT_OUT", {"codec": "video"})
    monkeypatch.setattr("benchmarks.lent.pack.STRIPPED", {"large": ("large/*.so",)})
    groups = ((), ("large",))
    return Packing(tmp_path / "out", 2, image, (lock,), root=checkout(tmp_path / "checkout"), groups=groups)


def checkout(root: Path) -> Path:
    """A project of its own with the runner and a plan of one stage, as a repository."""
    (root / "services").mkdir(parents=True)
    (root / "services" / "plugin.py").write_text("def register() -> None: ...\n")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "uses_large.py").write_text(STAGE)
    shutil.copytree(ROOT / "benchmarks" / "lent", root / "benchmarks" / "lent")
    for name in ("__init__.py", "ended.py", "figures.py", "tails.py"):
        shutil.copy(ROOT / "benchmarks" / name, root / "benchmarks")
    plan = root / "benchmarks" / "lent" / "stages.py"
    plan.rename(plan.with_name("table.py"))
    plan.write_text("from benchmarks.lent.table import *\n" + STAGES)
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    (root / "uncommitted.py").write_text("")
    return root


def there(part: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command of a part on the other machine, whose files are in this folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {"PYTHON": sys.executable, "QUARTET_LENT": str(folder), "QUARTET_TARGET": str(folder / "packages")}
    command = ["sh", str(part / "run.sh"), "--device", "cpu", "--seconds", "60", "--copy", str(folder / "out")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def contents(parts: list[Path]) -> dict[str, Any]:
    return json.loads((parts[0] / "MANIFEST.json").read_text())  # type: ignore[no-any-return]


def test_parts_install_and_run_the_plan_as_they_come(packing: Packing, tmp_path: Path) -> None:
    parts = pack(packing)
    assert len(parts) >= 2
    assert all(sum(file.stat().st_size for file in part.iterdir()) <= 2 << 20 for part in parts)
    names = [file["name"].partition("-")[0] for file in contents(parts)["files"]]
    assert names == ["project.tar", "quartet_ppo", "small", "common", "large", "there"]
    assert f"{len(parts)} parts, " in told(parts)
    first = there(parts[0], tmp_path / "machine")
    assert first.returncode == 0, first.stderr
    assert "without part 2 incomplete: large" in first.stdout
    assert "large: skipped, not installed: large" in first.stdout
    for part in parts[1:]:
        last = there(part, tmp_path / "machine")
        assert last.returncode == 0, last.stderr
    assert "incomplete" not in last.stdout
    (figure,) = [one for one in read(tmp_path / "machine" / "out" / "figures.jsonl") if one["kind"] == "figure"]
    assert (figure["size"], figure["plugin"]) == (3 << 20, True)
    installed = {path.name for path in (tmp_path / "machine" / "packages").iterdir()}
    assert {"small.py", "common.py", "there.py"} <= installed
    assert (tmp_path / "machine" / "packages" / "large" / "kernels").read_bytes() == KERNELS
    assert not (tmp_path / "machine" / "project" / "uncommitted.py").exists()


def test_the_page_names_the_versions_that_a_lent_machine_has() -> None:
    """Versions of its image where they stay, and else those of the lock, which the parts bring."""
    packing = Packing(Path("parts"))
    image = read_image(packing.image.read_text())
    locked = {entry.requirement.name: entry.version for lock in packing.locks for entry in read_lock(lock)}
    [named] = re.findall(r"`uv pip install ([^`]+)`", (ROOT / "benchmarks/lent/README.md").read_text())
    for name, _, version in (word.partition("==") for word in named.split()):
        kept = name in image and image[name].keep
        assert version == (image[name].version if kept else locked[name]), name


def test_only_a_large_file_that_shrinks_is_compressed_by_lzma(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(2 << 20)
    text, folder = b"0123456789abcdef" * (1 << 17), tmp_path / "stripped"
    folder.mkdir()
    path = strip(wheel(tmp_path, "a", "1", {"text": text, "short": text[:999], "noise": noise}), folder, ())
    with zipfile.ZipFile(path) as stripped:
        kinds = {info.filename: info.compress_type for info in stripped.infolist()}
        assert stripped.read("text") == text
    assert {name for name, kind in kinds.items() if kind == zipfile.ZIP_LZMA} == {"text"}
    assert {kinds["short"], kinds["noise"]} == {zipfile.ZIP_DEFLATED}


def test_other_bytes_are_refused_and_named_until_the_part_comes_again(packing: Packing, tmp_path: Path) -> None:
    parts = pack(packing)
    (piece,) = parts[0].glob("small-*")
    right = piece.read_bytes()
    piece.write_bytes(right[:-1] + b"?")
    done = there(parts[0], tmp_path / "machine")
    assert done.returncode == 1
    assert "small-1.5-py3-none-any.whl: its piece .000 is missing in" in done.stderr
    assert not (tmp_path / "machine" / "packages").exists()
    piece.write_bytes(right)
    assert there(parts[0], tmp_path / "machine").returncode == 0


def test_a_wheel_with_another_hash_than_the_lock_names_is_refused(packing: Packing) -> None:
    (lock,) = packing.locks
    wrong = re.sub(r"(common==1.0 .\n +--hash=sha256:)\w+", rf"\g<1>{'0' * 64}", lock.read_text())
    assert wrong != lock.read_text()
    lock.write_text(wrong)
    with pytest.raises(RuntimeError, match=r"(?s)pip download failed.*common"):
        pack(packing)
