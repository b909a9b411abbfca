"""The two sides of a race: each is asked for some updates and gives the seconds of every one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.ended import SIDE, ended, python_path, stopped
from benchmarks.vs_trl.cases import RATE, Case
from orchestrator.commands.init.machine import Machine
from orchestrator.commands.init.write import Wanted, chosen, compose
from orchestrator.deployment.facts.read import derived
from orchestrator.monitoring.metrics import FILE, TRACE, read_metrics

PEER = Path(__file__).with_name("peer.py")
VERSIONS = {"ppo": "trl==1.12.0", "grpo": "trl==1.16.0"}
"""Algorithm -> TRL's last release that has it; GRPO's is the newest that was raced."""
LIBRARIES = ("transformers>=5.19,<6", "torch==2.13.0")
"""Libraries as Quartet has them."""
CONFIG = "race.yaml"
LONGEST_S = 1800.0
"""Longest time of one command of a side, in seconds."""
STAGES = ("generate", "score", "logprobs", "train", "push")
"""Stages of a step of Quartet, as its metrics name them; scoring overlaps with generation."""


def make_environment(folder: Path, algorithm: str = "ppo") -> Path:
    """A virtual environment with the TRL of an algorithm in it, made once for each version; its Python."""
    python = folder / "bin" / "python"
    done, wanted = folder / ".installed", (VERSIONS[algorithm], *LIBRARIES)
    if not done.exists() or done.read_text() != "\n".join(wanted):
        uv = str(Path(sys.executable).with_name("uv"))
        wheels = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
        # As in the Makefile: a CPU build of torch is in a folder of wheels, or else on PyTorch's own index.
        torch, environment = ([], {"UV_FIND_LINKS": wheels}) if wheels else (["--torch-backend", "cpu"], {})
        # Of an installation that was broken off, or of another version, the folder is there already.
        venv = [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)]
        subprocess.run(venv, check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(python), *torch, *wanted]
        subprocess.run(install, check=True, env=os.environ | environment)
        done.write_text("\n".join(wanted))
    return python


@dataclass(frozen=True, slots=True)
class Trl:
    """TRL's trainer, a process for each turn."""

    python: Path
    folder: Path
    case: Case
    threads: int

    def updates(self, count: int) -> list[float]:
        """Seconds of each of `count` updates."""
        settings = asdict(self.case) | {
            "folder": str(self.folder),
            "updates": count,
            "threads": self.threads,
            "rate": RATE,
        }
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = str(self.threads)
        done = run([str(self.python), str(PEER), json.dumps(settings)], environment)
        lines = [json.loads(line) for line in done.splitlines() if line.startswith('{"seconds"')]
        return [line["seconds"] for line in lines]


class Quartet:
    """Quartet's services, which are up all the time."""

    def __init__(self, folder: Path, raw: dict[str, Any]) -> None:
        """`raw` is the contents of the file, whose run is called `race`."""
        self._config = folder / CONFIG
        self.folder = folder
        """Folder of its files, logs and runs."""
        self._raw = raw

    @property
    def trace(self) -> Path:
        """The trace file of its last updates."""
        return self.folder / "runs" / "race" / TRACE

    @contextmanager
    def served(self) -> Iterator[None]:
        """Context in which the services are up. What a start that failed or was broken off has left ends too."""
        try:
            self.up()
            yield
        finally:
            self.down()

    def up(self) -> None:
        """Starts the services."""
        self._write(1)
        self._quartet("up", str(self._config))

    def down(self) -> None:
        """Ends them."""
        self._quartet("down")

    def stopped(self) -> AbstractContextManager[None]:
        """Context in which all processes that it has started stand still."""
        return stopped(str(self.folder))

    def updates(self, count: int) -> list[dict[str, float]]:
        """Seconds of each of `count` updates, from the end of the one before as for TRL, and of its stages; when
        it ended, and the mean length of its responses."""
        self._write(count)
        self._quartet("train", "--overwrite", str(self._config))
        lines = [line for line in read_metrics(self.trace.with_name(FILE)) if line["step"]]
        return [
            {stage: line[f"seconds/{stage}"] for stage in STAGES}
            | {"step": line["seconds/wall"], "ended": line["time"], "length": line["response/length_mean"]}
            for line in lines
        ]

    def _write(self, steps: int) -> None:
        self._raw["orchestrator"]["steps"] = steps
        self._config.write_text(yaml.safe_dump(self._raw))

    def _quartet(self, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": python_path()} | {SIDE: str(self.folder)}
        run([sys.executable, "-m", "orchestrator.cli", *arguments], environment, self.folder)


def configured(folder: Path, case: Case) -> dict[str, Any]:
    """The file that `quartet init` writes for the models of a case, with its sizes, learning rate and arithmetic."""
    wanted = Wanted(
        str(folder / "policy"),
        str(folder / "reward"),
        str(folder / "prompts.jsonl"),
        max_new_tokens=case.response,
    )
    file = folder / CONFIG
    facts = yaml.safe_load(compose(file, wanted, chosen(file, wanted, Machine.here())))
    if case.algorithm != "ppo":
        facts["algorithm"] = {
            "kind": case.algorithm,
            "learning_rate": RATE,
            "samples_per_prompt": case.each,
        }
    raw = derived(facts, file)
    run = raw["orchestrator"]
    run |= {"batch_size": case.batch, "checkpoint": {"every": 0}, "log": {"tensorboard": False}}
    run["data"]["prompt_split"] = "train"
    run["sampling"]["min_new_tokens"] = case.response if case.equal else 0
    run["algorithm"] |= {
        "epochs": case.epochs,
        "minibatch_size": case.batch // case.minibatches,
        "old_logprobs": case.old_logprobs,
    }
    run["evaluation"]["every"] = 0
    parts = {application["name"]: application["args"] for application in raw["applications"]}
    parts["rollout"] |= {"max_num_seqs": case.batch}
    parts["reward"] = parts["reward"]["scorer"]
    learners = [run["policy"], *(args for name, args in parts.items() if name == "critic")]
    for part in (*parts.values(), run["policy"]):
        part["dtype"] = case.dtype
    for learner in learners:
        learner["optimizer"]["learning_rate"] = RATE
        learner["zero_stage"] = int(case.dtype == "bfloat16")
    return raw


def run(command: Sequence[str], environment: dict[str, str], folder: Path | None = None) -> str:
    """Runs a command and returns its output. RuntimeError with its last lines if it fails, or is not done after
    LONGEST_S; it is ended then, with all processes that it started in its session."""
    done = ended(command, environment, folder, LONGEST_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout
