"""Writes the parts that travel to a machine without a registry: the project, and the wheels that its image lacks."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lent import install
from benchmarks.lent.wheels import LEFT_OUT, STRIPPED, Wheelhouse, name_of, read_image, strip
from tests.lock import Entry, read

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MIB = 1 << 20
SCRIPTS = ("install.py", "run.sh")
GROUPS = (("trl", "cryptography"), ("ray[serve]",), ("vllm",))
"""Roots in the order in which they are packed: the stages without an engine need the first parts alone. What the
project asks for comes with the first group, less what later ones name."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Options of one packing."""

    out: Path
    """Folder to write, which has to be empty or not there yet."""
    part_mib: int = 55
    """Largest size of a part."""
    image: Path = HERE / "image.txt"
    locks: tuple[Path, ...] = (ROOT / "constraints" / "gpu.txt", HERE / "extra.txt")
    whole: bool = False
    """Strip nothing."""
    root: Path = ROOT
    groups: tuple[tuple[str, ...], ...] = GROUPS


def pack(packing: Packing) -> list[Path]:
    """Writes the parts; their folders.

    Raises:
        ValueError: the folder is not empty, a part is too small, or a package is missing in the lock.
        RuntimeError: git, pip or the build of the project failed.
    """
    if packing.out.exists() and any(packing.out.iterdir()):
        raise ValueError(f"{packing.out} is not empty: name a new folder")
    if packing.part_mib < 1:
        raise ValueError("--part-mib has to be at least 1")
    packing.out.mkdir(parents=True, exist_ok=True)
    entries: list[Entry] = [entry for lock in packing.locks for entry in read(lock)]
    with tempfile.TemporaryDirectory(dir=packing.out) as temporary:
        work = Path(temporary)
        archive, wheel = project(packing.root, work)
        house = Wheelhouse(work / "wheels", entries, read_image(packing.image.read_text()))
        later = {root.partition("[")[0] for group in packing.groups[1:] for root in group}
        house.add(wheel, {"engine"})
        files = [archive, wheel]
        own = [str(one) for one in house.asked(wheel) if one.name not in later]
        for index, group in enumerate(packing.groups):
            files += house.fetch([*own, *group] if index == 0 else group)
        if not packing.whole:
            (work / "stripped").mkdir()
            files = [_stripped(path, work / "stripped") for path in files]
        return split(files, packing.out, packing.part_mib * MIB)


def project(root: Path, folder: Path) -> tuple[Path, Path]:
    """The last commit of a checkout as an archive, and a wheel made of that, which has the project's entry points."""
    archive, tree = folder / "project.tar", folder / "tree"
    _carry_out(["git", "-C", str(root), "archive", "--format=tar", "-o", str(archive), "HEAD"])
    shutil.unpack_archive(archive, tree, "tar", filter="data")
    _carry_out([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], tree)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        if not any(name.endswith(".dist-info/entry_points.txt") for name in built.namelist()):
            raise RuntimeError(f"{wheel.name} has no entry points: vLLM would not find the project's plugin")
    return archive, wheel


def _stripped(path: Path, folder: Path) -> Path:
    patterns = STRIPPED.get(name_of(path)) if path.suffix == ".whl" else None
    return strip(path, folder, patterns) if patterns else path


def split(files: Sequence[Path], out: Path, limit: int) -> list[Path]:
    """Fills parts of at most `limit` bytes with the files in order; a file is cut where its part is full."""
    room = limit - MIB // 2  # for the manifest and the scripts
    parts: list[Path] = []
    used, entries = room, []
    for path in files:
        pieces: list[dict[str, Any]] = []
        whole = hashlib.sha256()
        left = path.stat().st_size
        with path.open("rb") as source:
            while left or not pieces:
                if used >= room:
                    parts.append(out / f"part{len(parts) + 1:02}")
                    parts[-1].mkdir()
                    used = 0
                data = source.read(min(left, room - used))
                name = f"{path.name}.{len(pieces):03}"
                (parts[-1] / name).write_bytes(data)
                whole.update(data)
                pieces.append({"name": name, "part": len(parts), "sha256": hashlib.sha256(data).hexdigest()})
                left, used = left - len(data), used + len(data)
        entries.append({"name": path.name, "sha256": whole.hexdigest(), "pieces": pieces})
    manifest = json.dumps({"parts": len(parts), "files": entries}, indent=1)
    for number, part in enumerate(parts, 1):
        (part / install.MANIFEST).write_text(manifest)
        (part / "NUMBER").write_text(f"{number}\n")
        for script in SCRIPTS:
            shutil.copy(HERE / script, part)
    return parts


def told(parts: Sequence[Path]) -> str:
    """Size and contents of each part, and what was left out."""
    lines, total = [], 0
    for part in parts:
        files = sorted(part.iterdir(), key=lambda path: -path.stat().st_size)
        size = sum(path.stat().st_size for path in files)
        total += size
        largest = ", ".join(f"{path.name.partition('-')[0]} {path.stat().st_size / MIB:.0f}" for path in files[:4])
        lines.append(f"{part.name}: {size / MIB:.1f} MiB in {len(files)} files ({largest})")
    lines.append(f"{len(parts)} parts, {total / MIB:.0f} MiB")
    lines += [f"left out: {name} ({why})" for name, why in LEFT_OUT.items()]
    return "\n".join(lines)


def _carry_out(command: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed:\n{done.stderr[-3000:]}")
