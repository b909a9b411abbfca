"""The shipped package: generated stubs, import names, light clients, commands."""

import subprocess
import sys
from importlib.metadata import distribution, entry_points, packages_distributions
from importlib.resources import files
from pathlib import Path

import pytest
from grpc_tools import protoc  # type: ignore[import-untyped]
from typer.testing import CliRunner

from orchestrator.cli import app

ROOT = Path(__file__).parents[3]
PROTOS = sorted((ROOT / "protos").glob("*.proto"))
NAMES = ("orchestrator", "protos", "quartet", "services", "recipes")
CLIENTS = ("services.rollout.client", "services.reward.client", "services.reference.client", "services.critic.client")
CLIENT_ALONE = (
    "import sys; before = {*sys.modules}; import services.reward.client; "
    "print(*sorted({name.partition('.')[0] for name in {*sys.modules} - before} - {*sys.stdlib_module_names}))"
)
"""Prints what the client of the reward service loads."""
HEAVY = ("ray", "vllm", "torch", "transformers", "deepspeed")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    """`make protos` after a change to a .proto, with the grpcio-tools that pyproject.toml pins."""
    options = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    include = str(files("grpc_tools") / "_proto")
    sources = [str(path.relative_to(ROOT)) for path in PROTOS]
    assert protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *options, *sources]) == 0
    generated = sorted((tmp_path / "protos").iterdir())
    assert len(generated) == 3 * len(PROTOS) == 15
    differing = [path.name for path in generated if path.read_bytes() != (ROOT / "protos" / path.name).read_bytes()]
    assert differing == []
    committed = {path.name for path in (ROOT / "protos").glob("*_pb2*")}
    assert committed == {path.name for path in generated}


@pytest.mark.parametrize("name", NAMES)
def test_import_names_collide_with_no_other_distribution(name: str) -> None:
    assert set(packages_distributions().get(name, [])) <= {"quartet-ppo"}


def test_the_distribution_names_its_plugin_and_command() -> None:
    ours = {(point.group, point.name): point for point in distribution("quartet-ppo").entry_points}
    assert ours["console_scripts", "quartet"].value == "orchestrator.entry:main"
    plugin = ours["vllm.general_plugins", "quartet"]
    assert plugin in entry_points(group="vllm.general_plugins")
    assert callable(plugin.load())


@pytest.mark.processes
def test_clients_need_neither_ray_nor_a_model_library() -> None:
    program = f"import sys, {', '.join(CLIENTS)}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"grpc", "numpy", "services"} <= loaded
    assert loaded.isdisjoint(HEAVY)


LIGHT = {"google", "grpc", "msgpack", "numpy", "protos", "quartet", "services", "typing_extensions"}
"""Packages, beside Python's own, that a program loads which scores."""
LOOKED_FOR = {"grpc_health", "grpc_reflection", "grpc_tools"}
"""Packages that grpc itself loads if they are installed."""


@pytest.mark.processes
def test_a_program_that_scores_loads_grpc_and_numpy_and_nothing_else() -> None:
    done = run(sys.executable, "-c", CLIENT_ALONE)
    assert done.returncode == 0, done.stderr
    assert {name for name in done.stdout.split() if "cython" not in name} - LOOKED_FOR == LIGHT


@pytest.mark.processes
@pytest.mark.parametrize("module", ["orchestrator.commands.score", "orchestrator.commands.evaluate_rows"])
def test_scoring_and_evaluating_rows_load_no_model_library(module: str) -> None:
    loaded = "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = run(sys.executable, "-c", f"import sys, orchestrator.report.evaluation, {module}; {loaded}")
    assert done.returncode == 0, done.stderr
    assert {*done.stdout.split()}.isdisjoint({*HEAVY, "datasets", "matplotlib", "pyarrow", "tokenizers"})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("says", "shown"),
    [("echo 3.10", "3.10"), ("echo 3.14", "3.14"), ("exit 1", "no Python that runs")],
)
def test_make_names_the_pythons_it_takes(says: str, shown: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{says}\n")
    python.chmod(0o755)
    done = run("make", "install", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 2
    expected = f"{python} is {shown}, and Quartet needs 3.11, 3.12 or 3.13, such as: make PYTHON=python3.12 install"
    assert expected in done.stderr
    assert not (tmp_path / "venv").exists()
    supported = [line for line in distribution("quartet-ppo").metadata.get_all("Classifier") or [] if ":: 3." in line]
    assert [line.rpartition(" ")[2] for line in supported] == ["3.11", "3.12", "3.13"]


COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    assert len(COMMANDS) >= 6
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert result.output.count("\n") > 5


@pytest.mark.processes
def test_the_installed_command_answers_without_loading_a_model_library() -> None:
    done = run(sys.executable, "-X", "importtime", str(Path(sys.executable).with_name("quartet")), "--help")
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert loaded.isdisjoint(HEAVY)
