"""Making things once: cache, invalidation, interruption."""

import asyncio
import errno
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from quartet.config.base import Seed
from recipes.common.build import make_once
from recipes.common.command import LARGEST_SEED, run
from recipes.common.stages import Stages


@dataclass(frozen=True)
class Settings:
    seed: int = 0


class Workshop:
    """A recipe whose build writes one file, counts its runs and fails on demand."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "models" / "thing"
        self.source = folder / "source.py"
        self.source.write_text("a = 1\n")
        self.runs = 0
        self.failure: BaseException | None = None
        self.printed = io.StringIO()

    def build(self, directory: Path, stages: Stages) -> Mapping[str, float]:
        with stages("carving"):
            (directory / "policy").mkdir()
            (directory / "policy" / "weights").write_text(f"run {self.runs}")
            self.runs += 1
            if self.failure is not None:
                raise self.failure
        return {"accuracy": 0.75}

    def make(self, seed: int = 0) -> bool:
        console = Console(file=self.printed, width=200)
        return make_once(self.out, Settings(seed), [self.source], self.build, console)

    @property
    def weights(self) -> str:
        return (self.out / "policy" / "weights").read_text()

    @property
    def beside(self) -> list[str]:
        return sorted(path.name for path in self.out.parent.iterdir())


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def test_the_record_tells_what_was_made(workshop: Workshop) -> None:
    assert workshop.make()
    record = json.loads((workshop.out / "recipe.json").read_text())
    assert record["settings"] == {"seed": 0}
    assert record["measures"] == {"accuracy": 0.75}
    assert record["files"] == {"policy/weights": 5}  # len("run 0")
    assert record["seconds"].keys() == {"carving"}
    assert workshop.beside == ["thing"]
    assert "carving" in workshop.printed.getvalue()
    assert "accuracy" in workshop.printed.getvalue()


def test_the_same_is_not_made_twice(workshop: Workshop) -> None:
    assert workshop.make()
    assert not workshop.make()
    assert workshop.runs == 1


def test_other_settings_make_it_again(workshop: Workshop) -> None:
    workshop.make(seed=0)
    assert workshop.make(seed=1)
    assert workshop.weights == "run 1"
    assert workshop.beside == ["thing"]


def test_a_changed_source_makes_it_again(workshop: Workshop) -> None:
    workshop.make()
    workshop.source.write_text("a = 2\n")
    assert workshop.make()


def test_a_missing_or_shortened_file_makes_it_again(workshop: Workshop) -> None:
    workshop.make()
    (workshop.out / "policy" / "weights").write_text("run")
    assert workshop.make()
    (workshop.out / "policy" / "weights").unlink()
    assert workshop.make()
    assert workshop.weights == "run 2"


def test_an_unreadable_record_makes_it_again(workshop: Workshop) -> None:
    workshop.make()
    (workshop.out / "recipe.json").write_text('{"digest": ')
    assert workshop.make()


def test_the_largest_seed_is_that_of_the_trainings() -> None:
    seeds = TypeAdapter(Seed)
    assert seeds.validate_python(LARGEST_SEED) == LARGEST_SEED
    with pytest.raises(ValidationError):
        seeds.validate_python(LARGEST_SEED + 1)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("no memory")])
def test_an_interrupted_build_leaves_nothing(workshop: Workshop, failure: BaseException) -> None:
    workshop.failure = failure
    with pytest.raises(type(failure)):
        workshop.make()
    assert workshop.beside == []


def test_an_interrupted_build_leaves_the_earlier_output(workshop: Workshop) -> None:
    workshop.make(seed=0)
    workshop.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        workshop.make(seed=1)
    assert workshop.weights == "run 0"
    assert workshop.beside == ["thing"]
    assert not workshop.make(seed=0)


def test_a_folder_with_other_things_is_left_alone(workshop: Workshop) -> None:
    workshop.out.mkdir(parents=True)
    (workshop.out / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"out: .*thing holds other things \(no recipe.json\)"):
        workshop.make()
    assert (workshop.out / "thesis.txt").read_text() == "years of work"
    assert workshop.runs == 0


def test_an_empty_folder_is_filled(workshop: Workshop) -> None:
    workshop.out.mkdir(parents=True)
    assert workshop.make()


def test_the_command_passes_folder_and_seed_on(tmp_path: Path) -> None:
    calls: list[tuple[Path, int]] = []

    def make(out: Path, seed: int, console: Console) -> bool:
        calls.append((out, seed))
        return True

    run("thing", make, ["--out", str(tmp_path), "--seed", "7"])
    run("thing", make, ["--seed", "4294967295"])
    run("thing", make, [])
    assert calls == [(tmp_path, 7), (Path("models/thing"), LARGEST_SEED), (Path("models/thing"), 0)]


@pytest.mark.parametrize("seed", ["-1", "1.5", "x", str(LARGEST_SEED + 1)])
def test_the_command_refuses_a_bad_seed(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("thing", lambda out, seed, console: True, [f"--seed={seed}"])
    assert stopped.value.code == 2
    assert f"--seed: '{seed}' is not a whole number from 0 to 4294967295" in capsys.readouterr().err


def test_the_command_reports_a_folder_with_other_things(capsys: pytest.CaptureFixture[str]) -> None:
    def make(out: Path, seed: int, console: Console) -> bool:
        raise FileExistsError("out: /thesis holds other things")

    with pytest.raises(SystemExit) as stopped:
        run("thing", make, [])
    assert stopped.value.code == 2
    assert "/thesis holds other things" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; the same command begins again"),
        (asyncio.CancelledError(), 130, "interrupted; the same command begins again"),
        (
            OSError(errno.ENOSPC, "No space left on device", "models/thing"),
            2,
            "No space left on device: 'models/thing'",
        ),
    ],
)
def test_the_command_ends_without_a_traceback(
    raised: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(out: Path, seed: int, console: Console) -> bool:
        raise raised

    with pytest.raises(SystemExit) as stopped:
        run("thing", make, [])
    assert stopped.value.code == status
    assert said in capsys.readouterr().err
