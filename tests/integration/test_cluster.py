"""A Ray head for a user who has a token of Ray's, which every head of this user then asks for."""

import urllib.error
from pathlib import Path

import pytest

from orchestrator import cluster


def test_a_head_that_asks_for_the_users_token_is_given_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef0123456789abcdef\n")
    state = tmp_path / ".quartet" / "cluster.json"
    head = cluster.start(lambda text: None, state)
    try:
        assert cluster.applications(head) == {}
        monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
        with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
            cluster.applications(head)
    finally:
        cluster.stop(head, state)
