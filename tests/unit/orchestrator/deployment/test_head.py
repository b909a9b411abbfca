"""The environment that all processes of a head inherit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.deployment.head import _environment
from quartet.config.functions import VARIABLE
from services.critic.replica import Critic

READS = """
from ray.serve._private import constants
print(
    constants.PROXY_HEALTH_CHECK_PERIOD_S,
    constants.PROXY_HEALTH_CHECK_TIMEOUT_S,
    constants.PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S,
    constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD,
    constants.RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS,
)
"""


def test_serve_finds_a_proxy_that_stands_still_within_ten_seconds() -> None:
    """A variable that Ray has renamed would say nothing."""
    told = subprocess.run([sys.executable, "-c", READS], env=_environment(), capture_output=True, text=True)
    period_s, timeout_s, shutdown_s, checks, forced = told.stdout.split()
    replaced_s = int(checks) * (float(period_s) + float(timeout_s)) + float(shutdown_s)
    assert replaced_s < 8, told.stderr
    # Meanwhile the critic's replica answers no check, and would lose its training.
    assert int(checks) * Critic._deployment_config.health_check_timeout_s > replaced_s + 2  # type: ignore[attr-defined]
    assert forced == "True"


@pytest.mark.parametrize("given", [None, "/mine"])
def test_modules_of_the_current_folder_hide_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """Functions are found by a variable of their own; PYTHONPATH, which Python searches first, stays the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given:
        monkeypatch.setenv("PYTHONPATH", given)
    environment = _environment()
    assert environment.get("PYTHONPATH") == given == os.environ.get("PYTHONPATH")
    assert environment[VARIABLE] == str(tmp_path)
