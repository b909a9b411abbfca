"""Environments of their own, with libraries that Quartet's lacks."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def installed(folder: Path, libraries: Sequence[str]) -> Path:
    """The Python of a new environment with these libraries."""
    uv, wheels = str(Path(sys.executable).with_name("uv")), os.environ.get("PIP_FIND_LINKS")
    # As in the Makefile: a CPU build of torch is in a folder of wheels, or else on PyTorch's own index.
    torch, environment = ([], {"UV_FIND_LINKS": wheels}) if wheels else (["--torch-backend", "cpu"], {})
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin/python"), *torch, *libraries]
    subprocess.run(install, check=True, env=os.environ | environment)
    return folder / "bin/python"
