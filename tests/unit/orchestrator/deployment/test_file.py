"""The YAML file as a whole."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.deployment.facts import scorers
from orchestrator.deployment.file import Deployment, ServicesFile
from quartet.config.base import ConfigError
from quartet.security.port import Port
from quartet.wire.errors import Unavailable, leaves

SERVICES = ("rollout", "reward", "reference", "critic")
FUNCTIONS = [
    "quartet.serving.proxy.end_with_caller",
    *(f"protos.{name}_pb2_grpc.add_{name.title()}Servicer_to_server" for name in SERVICES),
]


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def test_an_error_in_the_words_of_the_file_keeps_its_cause() -> None:
    written = ServicesFile(
        path=Path("a.yaml"), applications=(), services={}, raw={}, port=Port(), worded=scorers.stated
    )
    cause = OSError("of a user's own code")
    with pytest.raises(ConfigError, match=r"^port: taken$") as told, written.naming():
        raise ConfigError("grpc_options.port: taken") from cause
    assert told.value.__cause__ is cause


def test_so_does_one_in_a_group() -> None:
    written = ServicesFile(
        path=Path("a.yaml"), applications=(), services={}, raw={}, port=Port(), worded=scorers.stated
    )
    taken, other = ConfigError("grpc_options.port: taken"), Unavailable("rollout: gone")
    taken.__cause__ = OSError("of a user's own code")
    with pytest.raises(ExceptionGroup) as told, written.naming():
        raise ExceptionGroup("of tasks", [ExceptionGroup("of calls", [taken]), other])
    [named, same] = leaves(told.value)
    assert (type(named), str(named), named.__cause__, same) == (ConfigError, "port: taken", taken.__cause__, other)


def test_a_file_is_read_whole(tmp_path: Path, section: dict[str, Any]) -> None:
    applications = [{"name": "reward", "import_path": "services.reward.replica:build", "args": {"tokenizer": "no"}}]
    content = {
        "shared": {"x": 1},
        "grpc_options": {"port": 19000},
        "applications": applications,
        "orchestrator": section,
    }
    loaded = Deployment.load(write(tmp_path / "a.yaml", content))
    assert loaded.applications == ("reward",)
    assert loaded.orchestrator.name == "run"
    assert loaded.raw == content
    assert loaded.ports == {"http_options.port": 8000, "grpc_options.port": 19000}


def test_all_problems_are_told_at_once(tmp_path: Path, section: dict[str, Any], model: str) -> None:
    content = {
        "aplications": [],
        "grpc_options": {"grpc_servicer_functions": FUNCTIONS},
        "applications": [
            {"name": "critic", "import_path": "services.critic.replica:build", "args": {"modle": "x"}},
            {"name": "mine", "import_path": "elsewhere:build", "args": {"any": "thing"}},
            {"name": "rollout", "import_path": "services.rollout.replica:build", "args": {"model": model, "port": 1}},
            {"name": "reference", "import_path": "services.reference.replica:build"},
            {"name": "reward", "import_path": "services.reward.replica:build", "args": ["scorer"]},
        ],
        "orchestrator": section | {"step": 3},
    }
    path = write(tmp_path / "a.yaml", content)
    with pytest.raises(ConfigError) as caught:
        Deployment.load(path, check_services=True)
    lines = str(caught.value).splitlines()
    expected = [
        f"{path}: aplications: unknown section; known: applications, ",
        "applications.critic.args.model: required",
        "applications.critic.args.optimizer: required",
        "applications.critic.args.modle: unknown field; known: ",
        "applications.rollout.args.port: unknown field; known: ",
        "applications.reference.args.model: required",
        "applications.reward.args: should be a mapping of fields to values, got ['scorer']",
        "http_options.host: should be 127.0.0.1, ",
        "orchestrator.step: unknown field; known: ",
    ]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grpc_options": {"port": 9000}}, "orchestrator.target: 127.0.0.1:19000, but grpc_options.port is 9000"),
        ({"grpc_options": [9000]}, "grpc_options: should be a mapping, got [9000]"),
        ({"http_options": {"port": "web"}}, "http_options.port: should be a port from 1 to 65535, got 'web'"),
    ],
)
def test_options_of_serve_that_cannot_be(
    tmp_path: Path, section: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Deployment.load(write(tmp_path / "a.yaml", options | {"orchestrator": section}))


def test_a_target_elsewhere_has_a_port_of_its_own(tmp_path: Path, section: dict[str, Any]) -> None:
    content = {"grpc_options": {"port": 9000}, "orchestrator": section | {"target": "cluster:443"}}
    assert Deployment.load(write(tmp_path / "a.yaml", content)).orchestrator.target == "cluster:443"


@pytest.mark.parametrize("applications", [3, {"name": "reward"}, ["reward"]])
def test_applications_are_a_list_of_sections(tmp_path: Path, section: dict[str, Any], applications: Any) -> None:
    path = write(tmp_path / "a.yaml", {"applications": applications, "orchestrator": section})
    with pytest.raises(ConfigError, match="applications: should be a list, each with a name and an import_path"):
        Deployment.load(path, check_services=True)


def test_a_file_without_an_orchestrator(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", {"applications": []})
    with pytest.raises(ConfigError, match=r"a.yaml: applications: empty; a file of services holds one or more$"):
        Deployment.load(path)
    with pytest.raises(ConfigError) as caught:
        Deployment.load(write(path, {"applications": [], "orchestrator": None}))
    assert str(caught.value).splitlines() == [
        "orchestrator.name: required",
        "orchestrator.data: required",
        "orchestrator.policy: required",
    ]
    with pytest.raises(ConfigError, match="orchestrator: should be a mapping of fields to values, got 5"):
        Deployment.load(write(tmp_path / "a.yaml", {"orchestrator": 5}))


def test_a_file_that_opens_the_port_without_a_policy_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "open.yaml", {"applications": [], "security": {"host": "0.0.0.0"}})
    with pytest.raises(
        ConfigError, match=r"0\.0\.0\.0 is open to other machines, .*; set security.policy in the YAML"
    ):
        Deployment.load(path, check_services=True)


def test_the_port_of_a_file_without_the_section_is_that_of_the_environment(
    tmp_path: Path, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "plain.yaml", {"orchestrator": section})
    assert Deployment.load(path).port == Port()
    monkeypatch.setenv("QUARTET_GRPC_HOST", "0.0.0.0")
    with pytest.raises(ConfigError, match="is open to other machines"):
        Deployment.load(path, check_services=True)


@pytest.mark.parametrize("place", ["services/__init__.py", "protos/mine.py", "orchestrator.py", "recipes/cake.py"])
@pytest.mark.parametrize("of", ["the current folder", "PYTHONPATH"])
def test_a_module_with_the_name_of_one_of_ours_is_refused(
    tmp_path: Path, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch, place: str, of: str
) -> None:
    path, mine = write(tmp_path / "a.yaml", {"orchestrator": section}), tmp_path / "mine" / place
    (tmp_path / "services").mkdir()  # a folder without Python files is none of Python's
    mine.parent.mkdir(parents=True)
    if of == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    else:
        monkeypatch.chdir(tmp_path / "mine")
    Deployment.load(path)
    mine.touch()
    name = place.removesuffix(".py").split("/")[0]
    with pytest.raises(ConfigError, match=f"^{tmp_path / 'mine'} holds a Python module named {name}, which is"):
        Deployment.load(path)


@pytest.mark.parametrize("place", ["random.py", "statistics/__init__.py", "torch.py", "datasets/__init__.py"])
def test_a_module_of_the_current_folder_that_would_hide_one_of_python_or_of_a_package_is_refused(
    tmp_path: Path, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Ray's workers would import it in place of the other."""
    path, folder = write(tmp_path / "a.yaml", {"orchestrator": section}), tmp_path / "mine"
    for harmless in ("my_reward.py", "my_package/__init__.py", "test.py", "tests/__init__.py", "numpy/notes.txt"):
        (folder / harmless).parent.mkdir(parents=True, exist_ok=True)
        (folder / harmless).touch()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # a folder on the path hides nothing from itself
    Deployment.load(path)
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).touch()
    name = place.removesuffix(".py").split("/")[0]
    with pytest.raises(ConfigError, match=f"^{folder / place} has the name of .* {name}"):
        Deployment.load(path)


def test_a_package_of_an_environment_in_the_current_folder_is_hidden_too(
    tmp_path: Path, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `.venv` may lie beside the deploy file; a module elsewhere in the folder belongs to the user."""
    path = write(tmp_path / "a.yaml", {"orchestrator": section})
    installed, own = tmp_path / ".venv/lib/python3/site-packages", tmp_path / "src"
    for file in (installed / "colours.py", own / "shapes.py", tmp_path / "shapes.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(own)
    Deployment.load(path)
    (tmp_path / "colours.py").touch()
    with pytest.raises(ConfigError, match="colours"):
        Deployment.load(path)


@pytest.mark.parametrize(
    ("algorithm", "missing"),
    [
        ({"kind": "rloo", "samples_per_prompt": 4, "kl": {"coef": 0.0}}, ["rollout", "reward"]),
        ({}, ["rollout", "reward", "reference", "critic"]),
        ({"advantages": "no such"}, []),  # unknown which it would need
    ],
)
def test_no_complaint_follows_from_another(
    tmp_path: Path, section: dict[str, Any], algorithm: dict[str, Any], missing: list[str]
) -> None:
    del section["name"]
    path = write(tmp_path / "a.yaml", {"orchestrator": section | {"algorithm": algorithm}})
    with pytest.raises(ConfigError) as caught:
        Deployment.load(path, check_services=True)
    lines = str(caught.value).splitlines()
    assert "orchestrator.name: required" in lines
    assert [line.split()[4].rstrip(";") for line in lines if line.startswith("applications: none is")] == missing
