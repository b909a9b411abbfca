"""Lines of code by folder: printed, and enforced by nothing, since cohesion decides where a file ends."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("orchestrator", "quartet", "services", "protos", "recipes", "benchmarks", "tests")


def summary() -> str:
    """One line: the lines of each folder's Python files, generated ones left out."""
    return "lines: " + ", ".join(f"{folder} {_lines(ROOT / folder):,}" for folder in FOLDERS)


def _lines(folder: Path) -> int:
    files = (path for path in folder.rglob("*.py") if "_pb2" not in path.name)
    return sum(path.read_bytes().count(b"\n") for path in files)
