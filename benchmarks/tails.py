"""The ends of log files, which say why something failed after its own output has ended."""

from pathlib import Path

ENDINGS = {".log", ".err", ".out"}


def tails(folder: Path, *, files: int = 20, size: int = 2000) -> str:
    """The last bytes of the log files below a folder that were written last, the newest at the end."""
    found = [path for path in folder.rglob("*") if path.suffix in ENDINGS and path.is_file()]
    found = sorted((path for path in found if path.stat().st_size), key=lambda path: path.stat().st_mtime)
    ends = [(path, path.read_bytes()[-size:].decode(errors="replace").strip()) for path in found[-files:]]
    return "".join(f"---- {path.relative_to(folder)}\n{end}\n" for path, end in ends)
