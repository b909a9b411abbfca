"""Ids of runs, by which services know them: a run's name and a random part, so that no two runs share one."""

import re
import secrets

_RANDOM_BYTES = 4
_ID = re.compile(rf"(.+)-[0-9a-f]{{{2 * _RANDOM_BYTES}}}", re.DOTALL)


def new_run_id(name: str) -> str:
    """An id for a new run of this name."""
    return f"{name}-{secrets.token_hex(_RANDOM_BYTES)}"


def run_name(run_id: str) -> str:
    """The name of the run with this id; the id itself if no name and random part make it up."""
    found = _ID.fullmatch(run_id)
    return found[1] if found else run_id
