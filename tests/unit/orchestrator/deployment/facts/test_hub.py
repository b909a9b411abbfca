"""Models and data of a hub: fetched once, pinned, compared, and never anything that holds code."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from orchestrator.data.tables import open_split
from orchestrator.deployment.facts.facts import Facts
from orchestrator.deployment.facts.hub import ID, HuggingFace, Kind, Listing, Pinned
from orchestrator.deployment.facts.read import fetched
from quartet.config.base import ConfigError
from tests.configuration import REPO
from tests.hub import COMMIT, serving

MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"import os",
    "training_args.bin": b"a pickle",
    "onnx/model.safetensors": b"another",
    "README.md": b"#",
}
FETCHED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
NAME = "org/name@main"


def sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


@dataclass
class Fake(HuggingFace):
    """A hub in memory, whose calls are counted."""

    root: Path
    files: Mapping[str, bytes]
    commit: str = COMMIT
    told: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 that the hub gives."""
    listed: int = 0
    fetches: list[str] = field(default_factory=list)

    def listing(self, repository: str, revision: str, kind: Kind) -> Listing:
        """The files of the repository."""
        self.listed += 1
        return Listing(self.commit, {name: self.told.get(name) for name in self.files})

    def fetch(self, repository: str, commit: str, kind: Kind, name: str) -> None:
        """Writes one file."""
        self.fetches.append(name)
        path = self.folder(repository, commit, kind) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files[name])

    def folder(self, repository: str, commit: str, kind: Kind) -> Path:
        """The folder of the commit."""
        return self.root / repository.replace("/", "--") / commit


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "mine.lock"


def test_a_model_is_fetched_once_without_anything_that_holds_code(tmp_path: Path, lock: Path) -> None:
    hub = Fake(tmp_path / "hub", MODEL)
    folder = Path(Pinned(lock, hub).folder(NAME, "model", "model"))
    assert {path.name for path in folder.iterdir()} == FETCHED == set(hub.fetches)
    pin = yaml.safe_load(lock.read_text())["pins"][NAME]
    assert (pin["kind"], pin["commit"]) == ("model", COMMIT)
    assert pin["files"] == {name: sha256(MODEL[name]) for name in FETCHED}
    again = Fake(tmp_path / "hub", {})  # of which nothing can be had
    assert Pinned(lock, again).folder(NAME, "model", "model") == str(folder)
    assert (again.listed, again.fetches) == (0, [])


def test_a_pinned_revision_stays_what_it_was(tmp_path: Path, lock: Path) -> None:
    Pinned(lock, Fake(tmp_path / "hub", MODEL)).folder(NAME, "model", "model")
    moved = Fake(tmp_path / "elsewhere", MODEL, commit="b" * 40)
    folder = Pinned(lock, moved).folder(NAME, "model", "model")
    assert folder.endswith(COMMIT)  # another machine fetches the commit of the lock
    assert (moved.listed, set(moved.fetches)) == (0, FETCHED)


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json"])
def test_a_file_that_differs_from_its_pin_is_refused(tmp_path: Path, lock: Path, changed: str) -> None:
    pinned = Pinned(lock, Fake(tmp_path / "hub", MODEL))
    folder = Path(pinned.folder(NAME, "model", "model"))
    (folder / changed).write_bytes(b"other")
    with pytest.raises(ConfigError, match=f"model: .*{changed}: has SHA-256 .* pins .*; remove the file"):
        pinned.folder(NAME, "model", "model")
    # Also where it is fetched again.
    for path in folder.iterdir():
        path.unlink()
    other = Fake(tmp_path / "hub", MODEL | {changed: b"other"})
    with pytest.raises(ConfigError, match=f"{changed}: has SHA-256"):
        Pinned(lock, other).folder(NAME, "model", "model")


def test_a_hub_that_contradicts_itself_is_refused(tmp_path: Path, lock: Path) -> None:
    lying = Fake(tmp_path / "hub", MODEL, told={"model.safetensors": "0" * 64})
    with pytest.raises(ConfigError, match=r"model\.safetensors: has SHA-256 .*, but the hub says 0000"):
        Pinned(lock, lying).folder(NAME, "model", "model")
    with pytest.raises(ConfigError, match="the hub gives another commit"):
        Pinned(lock, Fake(tmp_path / "hub", MODEL)).folder(f"org/name@{'a' * 40}", "model", "model")
    with pytest.raises(ConfigError, match=r"the hub gives '\.\./up' as its commit"):
        Pinned(lock, Fake(tmp_path / "hub", MODEL, commit="../up")).folder(NAME, "model", "model")
    assert not lock.exists()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "holds no weights in safetensors"),
        ({"model.safetensors": b"x"}, "holds no config.json"),
        ({"../config.json": b"{}", "a/../../x.safetensors": b"x"}, "holds no weights in safetensors"),
    ],
)
def test_repositories_that_hold_no_model(tmp_path: Path, lock: Path, files: Mapping[str, bytes], says: str) -> None:
    with pytest.raises(ConfigError, match=f"critic: {NAME}: {says}"):
        Pinned(lock, Fake(tmp_path / "hub", files)).folder(NAME, "model", "critic")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../../x@main",
            "org/../name@main",
            "org/name@../../x",
            "org/name",
            "/etc/x@main",
            "org/na..me@x",
            "name@x",
        ),
        *("org/name@", "org/name@a..b", "org/name@-x", ".org/name@x", "org/name@x\n", "a/b/c@x", "org\\n/x@y"),
        *("org/name@x/", "org/name@x/../up", "org/name@x//up", "org/name@refs/../x"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, lock: Path, name: str) -> None:
    assert ID.fullmatch(name) is None
    hub = Fake(tmp_path / "hub", MODEL)
    with pytest.raises(ConfigError, match="model: should be a folder or ORG/NAME@REVISION"):
        Pinned(lock, hub).folder(name, "model", "model")
    assert (hub.listed, lock.exists()) == (0, False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"commit": "../../up"}, "commit: should be 40 hexadecimal digits"),
        ({"files": {"config.json": "short"}}, "should be 64 hexadecimal digits"),
        ({"files": {"../../x": "0" * 64}}, "should be the name of a file in its repository"),
        ({"files": {"/etc/passwd": "0" * 64}}, "should be the name of a file in its repository"),
        ({"files": {}}, "pins no file of org/name"),
        ({"kind": "dataset"}, "pins org/name@main as a dataset, which is to be a model"),
        ({"more": 1}, "more: unknown field"),
    ],
)
def test_a_lock_that_was_tampered_with_is_refused(
    tmp_path: Path, lock: Path, change: dict[str, object], says: str
) -> None:
    pinned = Pinned(lock, Fake(tmp_path / "hub", MODEL))
    pinned.folder(NAME, "model", "model")
    written = yaml.safe_load(lock.read_text())
    written["pins"][NAME] |= change
    lock.write_text(yaml.safe_dump(written))
    with pytest.raises(ConfigError, match=says):
        pinned.folder(NAME, "model", "model")


ROWS = b'{"prompt": "w4"}\n'
DATA = {
    "main/train-00000-of-00002.jsonl": ROWS,
    "main/train-00001-of-00002.jsonl": ROWS * 2,
    "main/test-00000-of-00001.jsonl": ROWS,
    "main/run.py": b"import os",
    "other/train.jsonl": ROWS,
    "dataset_infos.json": b"{}",
    "../up/train.jsonl": ROWS,
}


def test_data_come_from_one_folder_whose_parts_make_splits(tmp_path: Path, lock: Path) -> None:
    hub = Fake(tmp_path / "hub", DATA)
    with pytest.raises(ConfigError, match=r"in several folders; write one of them .* after a slash: main, other"):
        Pinned(lock, hub).folder(NAME, "dataset", "prompts.path")
    with pytest.raises(ConfigError, match=r"holds no data in the folder up; folders with data are main, other"):
        Pinned(lock, hub).folder(f"{NAME}/up", "dataset", "prompts.path")
    with pytest.raises(ConfigError, match="model: should be a folder or ORG/NAME@REVISION, got 'org/name@main/main'"):
        Pinned(lock, hub).folder(f"{NAME}/main", "model", "model")
    folder = Pinned(lock, hub).folder(f"{NAME}/main", "dataset", "prompts.path")
    assert len(open_split(folder, "train").rows) == 3
    assert len(open_split(folder, "test").rows) == 1
    assert len(hub.fetches) == 3
    (Path(folder) / "train-00001-of-00002.jsonl").unlink()
    with pytest.raises(ConfigError, match="split 'train' has 1 of 2 parts"):
        open_split(folder, "train")


@pytest.mark.parametrize(
    ("name", "revision", "inside"),
    [
        ("org/name@main", "main", None),
        ("org/name@v1.0/data/en", "v1.0", "data/en"),
        ("org/name@refs/convert/parquet/main/train", "refs/convert/parquet", "main/train"),
        ("org/name@refs/pr/7", "refs/pr/7", None),
    ],
)
def test_a_folder_stands_behind_the_revision(name: str, revision: str, inside: str | None) -> None:
    match = ID.fullmatch(name)
    assert match
    assert (match["revision"], match["inside"]) == (revision, inside)


def test_facts_name_models_of_a_hub_and_folders_stay_folders(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "mine@main").mkdir(parents=True)
    facts = Facts.of(
        {
            **{"name": "x", "model": NAME, "reward": "org/mine@main", "prompts": "prompts.jsonl", "critic": NAME},
            "algorithm": {"kind": "ppo", "learning_rate": 1e-4},
            "services": {"reference": {"model": "org/name@v2"}},
        }
    )
    hub = Fake(tmp_path / "hub", MODEL)
    found = fetched(facts, Pinned(lock, hub))
    assert found.model == found.critic == str(tmp_path / "hub" / "org--name" / COMMIT)
    assert (found.reward, found.prompts.path) == ("org/mine@main", "prompts.jsonl")
    assert found.services["reference"]["model"] == found.model  # another revision of the same commit
    assert set(yaml.safe_load(lock.read_text())["pins"]) == {NAME, "org/name@v2"}
    assert hub.listed == 2


PROGRAM = """
import sys
from pathlib import Path
from orchestrator.deployment.facts.hub import Pinned
from quartet.config.base import ConfigError
pinned = Pinned.beside(Path("mine.yaml"))
try:
    print(pinned.folder("org/name@main", "model", "model"))
    print(pinned.folder("org/rows@v1", "dataset", "prompts.path"))
except ConfigError as error:
    sys.exit(str(error))
"""


def test_huggingface_hub_fetches_from_the_hub_that_the_environment_names(tmp_path: Path) -> None:
    def run(endpoint: str, **more: str) -> subprocess.CompletedProcess[str]:
        hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        environment = os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_DISABLE_XET": "1"} | hub | more
        return subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    refused = run("http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "model: org/name@main: is not on this machine, and HF_HUB_OFFLINE forbids to fetch it" in refused.stderr
    repositories = {"models/org/name": MODEL, "datasets/org/rows": {"data/train.jsonl": ROWS}}
    with serving(repositories) as (endpoint, asked):
        done = run(endpoint)
        assert done.returncode == 0, done.stderr
        missing = run(endpoint, HF_HOME=str(tmp_path / "empty"))
        assert missing.returncode == 0, missing.stderr
    model, data = map(Path, done.stdout.split())
    assert {path.name for path in model.iterdir()} == FETCHED
    assert (data / "train.jsonl").read_bytes() == ROWS
    assert not [path for path in asked if path.endswith((".bin", ".py", ".md"))]
    # Nothing listens any more, and nothing has to.
    for offline in ("0", "1"):
        again = run(endpoint, HF_HUB_OFFLINE=offline)
        assert again.stdout == done.stdout, again.stderr
    (tmp_path / "mine.lock").unlink()
    gone = run(endpoint)
    assert gone.stderr.startswith("model: org/name@main: cannot be fetched: ")
