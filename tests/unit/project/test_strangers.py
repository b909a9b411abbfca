"""A caller from elsewhere is believed where it reaches what is open to it."""

import sys
from pathlib import Path

import pytest

from tests.strangers import UNREACHABLE, Stranger

ANSWERS = "import json, sys; print(json.dumps({port: {said} for port in json.loads(sys.argv[-1])['ports']}))"


def told(said: str, folder: Path) -> dict[int, str]:
    """The answers of a caller to which each port answers so."""
    program = ANSWERS.replace("{said}", said)
    return Stranger("127.0.0.1", (sys.executable, "-c", program), True).asks([9], folder / "planted")


def test_a_caller_to_whom_even_an_open_port_is_closed_proves_nothing(tmp_path: Path) -> None:
    assert told(f"'{UNREACHABLE}' if port == 9 else 'silent'", tmp_path) == {9: UNREACHABLE}
    with pytest.raises(AssertionError, match="reaches nothing on this machine"):
        told(f"'{UNREACHABLE}'", tmp_path)
