"""The `quartet` command: what it refuses itself, and how it shows what went wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli import _guarded, app
from services.common.config.base import ConfigError
from services.common.wire.errors import NotFound, Unavailable
from tests.gpu_requests import load

HINT = "are the services up? `quartet up FILE` starts them"


def test_a_number_of_samples_is_not_negative(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", "--samples", "-1", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == "--samples: should be 0 or more, got -1"


def raising(error: Exception) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ConfigError("a: required"), ["error: a: required"]),
        (
            ExceptionGroup("", [NotFound("reward.Info: no"), NotFound("reward.Info: no")]),
            ["error: reward.Info: no", HINT],
        ),
        (Unavailable("critic.Info: gone"), ["error: critic.Info: gone", HINT]),
        # One hint is enough.
        (Unavailable("no service; quartet up a.yaml"), ["error: no service; quartet up a.yaml"]),
    ],
)
def test_what_a_user_can_act_on_is_text(
    error: Exception, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _guarded(raising(error)) == 1
    assert capsys.readouterr().err.splitlines() == shown


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        _guarded(raising(KeyError("x")))


def test_up_wants_something_to_show_at_a_port_with_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARTET_CREDENTIALS", raising=False)
    deployment = load(Path(__file__).parents[3] / "deploy/ppo-open.yaml", tmp_path)
    done = CliRunner().invoke(app, ["up", str(deployment.path)])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("QUARTET_CREDENTIALS: unset")
