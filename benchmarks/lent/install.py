"""Installs what the parts hold that have come so far. It travels in each part, and imports nothing of the project.

    python3 install.py PART [--store FOLDER] [--target FOLDER]

The pieces of a part are checked and collected in the store. A file whose pieces are all there is joined, checked and
installed: a wheel into this Python's environment, the project's archive into `STORE/project`. What is still missing
is named, with the parts that hold it. Parts may come in any order, and twice.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STORE = "/tmp/quartet-lent"
MANIFEST = "MANIFEST.json"


class Wrong(Exception):
    """Something that came is not what was packed."""


def collect(part: Path, store: Path) -> dict[str, Any]:
    """Takes a part's pieces into the store; the list of all files of the packing.

    Raises:
        Wrong: a piece has other bytes than were packed, or is of another packing.
    """
    text = (part / MANIFEST).read_text()
    manifest: dict[str, Any] = json.loads(text)
    (store / "pieces").mkdir(parents=True, exist_ok=True)
    kept = store / MANIFEST
    if kept.exists() and kept.read_text() != text:
        raise Wrong(f"{part} is of another packing than what is in {store}: remove {store}, and send all parts again")
    number = number_of(part, manifest)
    wrong = []
    for file in manifest["files"]:
        for piece in file["pieces"]:
            source = part / piece["name"]
            if piece["part"] != number or (store / "files" / file["name"]).exists():
                continue
            if not source.exists() or digest(source) != piece["sha256"]:
                suffix = piece["name"].removeprefix(file["name"])
                wrong.append(
                    f"{file['name']}: its piece {suffix} is missing in {part}, or has other bytes than packed"
                )
                continue
            shutil.copyfile(source, store / "pieces" / "new")
            (store / "pieces" / "new").rename(store / "pieces" / piece["name"])
    kept.write_text(text)
    if wrong:
        raise Wrong("\n".join([*wrong, "send that part again"]))
    return manifest


def number_of(part: Path, manifest: dict[str, Any]) -> int:
    """Number of a part, which its file NUMBER holds."""
    number = int((part / "NUMBER").read_text())
    if not 1 <= number <= manifest["parts"]:
        raise Wrong(f"{part} is part {number} of {manifest['parts']}")
    return number


def join(manifest: dict[str, Any], store: Path) -> tuple[list[Path], list[str]]:
    """Joins the files whose pieces are there: those that are new, and for each missing part what waits for it.

    Raises:
        Wrong: a joined file has other bytes than were packed.
    """
    files, new = store / "files", []
    waiting: dict[int, list[str]] = {}
    files.mkdir(exist_ok=True)
    for file in manifest["files"]:
        target = files / file["name"]
        if target.exists():
            continue
        missing = sorted({one["part"] for one in file["pieces"] if not (store / "pieces" / one["name"]).exists()})
        if missing:
            for part in missing:
                waiting.setdefault(part, []).append(file["name"].partition("-")[0])
            continue
        pieces = [store / "pieces" / one["name"] for one in file["pieces"]]
        with (store / "pieces" / "new").open("wb") as joined:
            for piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, joined, 1 << 20)
        if digest(store / "pieces" / "new") != file["sha256"]:
            raise Wrong(f"{file['name']}: the joined file has other bytes than were packed")
        (store / "pieces" / "new").rename(target)
        new.append(target)
        for piece in pieces:
            piece.unlink()
    return new, [f"without part {part} incomplete: {', '.join(names)}" for part, names in sorted(waiting.items())]


def install(files: Iterable[Path], store: Path, target: Path | None) -> None:
    """Installs wheels and unpacks the project. CalledProcessError if pip does not take them."""
    wheels = [str(path) for path in files if path.suffix == ".whl"]
    for path in files:
        if path.suffix == ".tar":
            with tarfile.open(path) as archive:
                archive.extractall(store / "project", filter="data")
    if wheels:
        into = ["--target", str(target), "--upgrade"] if target else ["--force-reinstall"]
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check", *into]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", *options, *wheels]
        subprocess.run(command, check=True)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str]) -> int:
    """Installs one part; 1 with the reason if that fails."""
    parser = argparse.ArgumentParser(description="Installs what the parts hold that have come so far.")
    parser.add_argument("part", type=Path)
    parser.add_argument("--store", type=Path, default=Path(STORE))
    parser.add_argument("--target", type=Path, help="folder for the packages, instead of this Python's environment")
    options = parser.parse_args(arguments)
    done = options.store / "installed"
    try:
        new, incomplete = join(collect(options.part, options.store), options.store)
        known = set(done.read_text().splitlines()) if done.exists() else set()
        due = [path for path in sorted((options.store / "files").iterdir()) if path.name not in known]
        install(due, options.store, options.target)
    except (Wrong, subprocess.CalledProcessError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    done.write_text("".join(f"{path.name}\n" for path in sorted((options.store / "files").iterdir())))
    print(f"installed {len(due)} files of {options.part}, {len(new)} of them new", *incomplete, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
