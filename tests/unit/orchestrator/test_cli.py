"""The `quartet` command: what it refuses itself, and how it shows what went wrong."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator import cli
from orchestrator.cli import _guarded, app
from quartet.config.base import ConfigError
from quartet.wire.errors import NotFound, Unavailable
from tests.gpu_requests import load
from tests.unit.scoring import InThread, length, right

HINT = "are the services up? `serve status` shows them, `serve deploy FILE` starts them "
HINT += "(of a file of facts, what `quartet render FILE` prints)"


def test_a_number_of_samples_is_not_negative(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", "--samples", "-1", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == "--samples: should be 0 or more, got -1"


ROWS = '{"prompt": "2 + 2 =", "response": "four", "n": 1}\n{"prompt": "2 + 3 =", "response": "?"}\n'


def test_rows_of_standard_input_are_printed_with_their_scores() -> None:
    with InThread({"length": length}) as target:
        done = CliRunner().invoke(app, ["score", "-", "--hub", target], input=ROWS)
    assert done.exit_code == 0, done.output
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["n"], first["scores"]) == (1, {"length": 4.0})
    assert (second["scores"], second["reasons"]) == ({"length": None}, {"length": "a question"})
    assert "1 scored, 1 not applicable (line 2: a question)" in done.stderr


def test_rows_of_a_file_are_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("answers.jsonl").write_text(ROWS)
    with InThread({"length": length, "right": right}) as target:
        options = ["--hub", target, "--scorer", "length", "--scorer", "right", "--pass-at", "1"]
        done = CliRunner().invoke(app, ["evaluate", "answers.jsonl", *options])
        assert done.exit_code == 0, done.output
        again = CliRunner().invoke(app, ["evaluate", "answers.jsonl", *options])
        assert again.exit_code == 0, again.output
        refused = CliRunner().invoke(app, ["evaluate", "answers.jsonl", "--hub", target, "--scorer", "right"])
    for said in ("length", "right", "pass@1", "4.000", "hhhhhhhhhhhh"):
        assert said in done.stdout
    assert {file.name for file in Path("evaluations/answers").iterdir()} == {
        "rows.jsonl",
        "journal.jsonl",
        "summary.json",
        "evaluation.html",
    }
    assert isinstance(refused.exception, ConfigError)
    assert "--scorer length: was" in str(refused.exception)


@pytest.mark.parametrize("command", ["score", "evaluate"])
def test_a_reward_service_of_another_name_is_asked_by_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("answers.jsonl").write_text(ROWS)
    with InThread({"length": length}, application="taste") as target:
        asked = [command, "answers.jsonl", "--hub", target, "--output", "out"]
        done = CliRunner().invoke(app, [*asked, "--application", "taste"])
        assert done.exit_code == 0, done.output
        other = CliRunner().invoke(app, [*asked, "--overwrite"])
    assert isinstance(other.exception, NotFound)
    assert str(other.exception) == "reward.Info: there is only taste"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.yaml", "--hub", "127.0.0.1:1"], "--hub: for rows of JSONL"),
        (["a.yaml", "--samples", "1", "--field", "top_p=0.5"], "--samples, --field: for rows of JSONL"),
        (["a.jsonl"], "--hub: required"),
        (["a.jsonl", "--hub", "127.0.0.1:1", "--split", "eval"], "--split: for a run's YAML file"),
        (["a.jsonl", "--hub", "127.0.0.1:1", "--field", "x"], "--field: should be NAME=JSON"),
    ],
)
def test_an_option_for_the_other_kind_of_evaluation_is_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["evaluate", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(said)


@pytest.mark.parametrize("command", ["score", "evaluate"])
def test_work_on_rows_that_is_interrupted_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    async def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.commands.score.score_file", interrupt)
    monkeypatch.setattr("orchestrator.commands.evaluate_rows.evaluate_rows", interrupt)
    output = str(tmp_path / "out")
    done = CliRunner().invoke(app, [command, "a.jsonl", "--hub", "127.0.0.1:1", "--output", output])
    assert done.exit_code == 130
    assert f"the same command goes on in {output}" in done.stderr.replace("\n", "")


@pytest.mark.processes
def test_a_command_that_waits_for_standard_input_can_be_interrupted() -> None:
    asked = threading.Event()

    def judge(prompt: str, response: str) -> float:
        asked.set()  # when the service is asked for its description, too
        return 0.0

    with InThread({"judge": judge}) as target:
        command = [sys.executable, "-c", "from orchestrator.cli import main; main()", "score", "-", "--hub", target]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
            assert asked.wait(60)
            # Until the answer has arrived and the input is waited for: asyncio would tell of a task that a signal
            # cancels in the very moment in which it is woken.
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            assert process.wait(60) == 130
    assert said == "interrupted\n"


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
        (Unavailable("no service; `quartet up a.yaml`"), ["error: no service; `quartet up a.yaml`"]),
        (FileExistsError(errno.EEXIST, "File exists", "runs"), ["error: runs: File exists"]),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "runs/a"), ["error: runs/a: Not a directory"]),
    ],
)
def test_what_a_user_can_act_on_is_text(
    error: Exception, shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("hidden", "shown"),
    [
        ("typer.py", "error: no module typer: this is the light install"),
        ("quartet/__init__.py", "error: no module quartet.config: Python found a package quartet in "),
        ("services/__init__.py", "error: no module services.rollout: Python found a package services in "),
    ],
)
def test_an_install_that_lacks_a_module_says_so_in_a_line(tmp_path: Path, hidden: str, shown: str) -> None:
    """A user's folder on PYTHONPATH stands for both: a module that is missing, and a package that hides ours."""
    module = tmp_path / hidden
    module.parent.mkdir(exist_ok=True)
    module.write_text("raise ModuleNotFoundError(name='typer')\n" if hidden == "typer.py" else "")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    command = [sys.executable, "-P", "-c", "from orchestrator.cli import main; main()", "check", "a.yaml"]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(shown)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("terminal", "expected"), [(True, None), (False, "1")])
def test_progress_bars_of_libraries_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(cli, "app", lambda: None)
    with pytest.raises(SystemExit):
        cli._carry_out()
    assert os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == expected


@pytest.mark.parametrize(("alive", "said"), [(True, "stopped the Ray head"), (False, "had ended before")])
def test_down_tells_a_head_that_runs_from_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch, alive: bool, said: str
) -> None:
    head, stopped = SimpleNamespace(alive=alive, address="127.0.0.1:1"), list[Any]()
    monkeypatch.setattr("orchestrator.deployment.cluster.last", lambda: head)
    monkeypatch.setattr("orchestrator.deployment.cluster.stop", stopped.append)
    done = CliRunner().invoke(app, ["down"])
    assert (done.exit_code, stopped) == (0, [head])
    assert said in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("up", "interrupted; what was started goes on: `quartet up {}` waits for it, `quartet down` stops it"),
        ("train", "interrupted before the first checkpoint"),
    ],
)
def test_a_user_who_interrupts_hears_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, said: str
) -> None:
    deployment = load(Path(__file__).parents[3] / "deploy/ppo.yaml", tmp_path)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.commands.up.up", interrupt)
    monkeypatch.setattr("orchestrator.commands.train.train", interrupt)
    done = CliRunner().invoke(app, [command, str(deployment.path)])
    assert done.exit_code == 130
    assert done.stderr.startswith(said.format(deployment.path))


def test_a_name_that_is_taken_is_refused_before_anything_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = load(Path(__file__).parents[3] / "deploy/ppo.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "orchestrator.commands.train.preflight", None
    )  # which would read models, prompts and functions
    kept = Path("runs", deployment.orchestrator.name, "checkpoints", "step-000010", "state.json")
    kept.parent.mkdir(parents=True)
    kept.touch()
    done = CliRunner().invoke(app, ["train", str(deployment.path)])
    assert isinstance(done.exception, ConfigError)
    assert "already holds checkpoints; choose another name, --resume them, or --overwrite" in str(done.exception)
    assert kept.exists()


INTERRUPTED = """
import asyncio, sys
sys.argv = ["quartet", "train", "ppo.yaml"]
from orchestrator import cli
from orchestrator.commands import train

async def mended(*_, **__):
    asyncio.current_task().cancel()  # as a group does whose failures are mended one in the moment of another
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        pass
    with train.ended_like_interrupted():
        print("trains", flush=True)
        await asyncio.sleep(60)

train.train = mended
cli.main()
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_has_mended_a_loss_ends_by_a_signal_with_advice(tmp_path: Path, number: signal.Signals) -> None:
    load(Path(__file__).parents[3] / "deploy/ppo.yaml", tmp_path)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-P", "-c", INTERRUPTED]
    with subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ignored where these tests run in the background; SIGTERM has to end a run there too.
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN
        ),
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "trains\n"
        run.send_signal(number)
        _, told = run.communicate(timeout=60)
    assert run.returncode == 130, told
    assert told.startswith("interrupted before the first checkpoint")
    assert "Traceback" not in told


@pytest.mark.processes
@pytest.mark.parametrize("command", [("check",), ("train",), ("evaluate",), ("up",)])
def test_an_error_in_the_file_waits_for_no_model_library(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "a.yaml").write_text("orchestrator: {name: a, stepz: 3}\n")
    program = (
        f"import sys; sys.argv = ['quartet', *{[*command, 'a.yaml']}]\n"
        "from orchestrator import cli\n"
        "try: cli.main()\n"
        "finally: print(sorted({'torch', 'transformers', 'vllm'} & sys.modules.keys()))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "orchestrator.stepz: unknown field" in done.stderr
    assert (done.returncode, done.stdout) == (1, "[]\n")
