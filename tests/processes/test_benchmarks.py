"""Every benchmark runs to its end at its smallest size, so that none rots. The figures say nothing here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ended import MARK, end_marked

ROOT = Path(__file__).parents[2]
TRL = ".quartet/trl/bin/python"
TINY = ("--sizes", "tiny", "--device", "cpu")
SMALL_STEP = ("--batch", "8", "--prompt", "16", "--new", "16", "--updates", "2")
SMALLEST: dict[str, tuple[str, ...]] = {
    "adapters": ("--size", "tiny", "--rounds", "1", "--prompts", "2", "--new", "4"),
    "agents": ("--rounds", "1", "--steps", "1"),
    "beside": ("--rounds", "1", "--steps", "1"),
    "demo_seeds": ("--seeds", "", "--without-kl", "0", "--steps", "1"),
    "door": ("--seconds", "0.5", "--rounds", "1", "--callers", "1", "--callers", "4", "--new", "8"),
    "function_workers": ("--seconds", "4", "--rounds", "1"),
    "gpu.engine": (*TINY, "--prompts", "8", "--prompt", "16", "--new", "16"),
    "gpu.group": ("--device", "cpu", "--mib", "1"),
    "gpu.kernels": ("--device", "cpu", "--positions", "256", "--vocabulary", "512", "--tokens", "512"),
    "gpu.kills": ("--device", "cpu", "--backend", "ipc", "--mib", "8", "--stall-s", "2"),
    "gpu.machine": ("--device", "cpu", "--mib", "8", "--side", "128"),
    "gpu.models": ("models/tiny", "--size", "tiny"),
    "gpu.pushes": (*TINY, "--rounds", "1"),
    "gpu.service": (
        *("--size", "tiny", "--device", "cpu", "--prompts", "4", "--prompt", "16", "--new", "16", "--rounds", "1"),
    ),
    "gpu.step": (*TINY, *SMALL_STEP, "--ways", "lock-step;ahead;two engines;sampled log-probs", "--peer", TRL),
    "gpu.training": (*TINY, "--tokens", "512", "--length", "64"),
    "groups": (
        *("--rounds", "1", "--groups", "1", "--prompt", "64", "--hidden", "64", "--layers", "1", "--sampled", "64"),
    ),
    "learner": ("step", "--rounds", "1"),
    "loop_cost": ("--size", "16x16", "--steps", "1"),
    "pipeline": ("--case", "reward-bound", "--seconds", "0.5", "--rounds", "1", "--steps", "1"),
    "push": ("--mib", "1", "--replicas", "1", "--rounds", "1", "--bucket-mib", "1"),
    "reward": ("--seconds", "0.5", "--rounds", "1", "--callers", "4", "--hidden", "64", "--layers", "1"),
    "rollout": ("--rounds", "1", "--prompts", "4"),
    "staleness": ("--schedules", "5"),
    "vs_trl": ("--case", "demo", "--case", "grpo", "--rounds", "1", "--updates", "2"),
}
"""Module below benchmarks -> its arguments."""
QUICK = {"loop_cost", "staleness"}
"""The benchmarks in `make test`: a process by itself, and real clients of emulated services."""
NEEDS = {"rollout": "models", "vs_trl": "trl", "gpu.step": "trl"}
"""The fixture of what a benchmark reads and does not make."""
PEER = "vs_trl.peer"
"""TRL's side of a race, which the race runs in TRL's environment."""
SERVED = "emulated.answers"
"""The services of loop_cost, which ends them."""
PLAN = {"lent", "lent.install"}
"""The plan of a lent machine and its installer, which have tests of their own: test_lent.py, test_lent_pack.py."""
NEEDS_GPU = {"vllm", "vllm, packed", "cuda-ipc"}
"""Sides of gpu.pushes that no CPU can run; they are errors in its table."""


def commands() -> set[str]:
    """The modules below benchmarks that are commands."""
    files = [path for path in (ROOT / "benchmarks").rglob("*.py") if "__main__" in path.read_text()]
    modules = [path.relative_to(ROOT / "benchmarks").with_suffix("").parts for path in files]
    return {".".join(part for part in parts if part != "__main__") for parts in modules}


def test_every_benchmark_is_in_the_list() -> None:
    assert commands() - {PEER, SERVED} - PLAN == set(SMALLEST)


def test_the_page_names_every_benchmark() -> None:
    table = (
        (ROOT / "docs/development.md").read_text().partition("| Name | What is measured |")[2].partition("\n\n")[0]
    )
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.partition(" | ")[0])}
    assert named == {name.partition(".")[0] for name in commands() - {SERVED}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout's, with the demo's models."""
    made = tmp_path_factory.mktemp("benchmarks")
    (made / "deploy").symlink_to(ROOT / "deploy")
    return made


@pytest.fixture(scope="module")
def models(folder: Path) -> None:
    """The demo's models, for the benchmarks that read them."""
    run(folder, "recipes.reviews")


@pytest.fixture(scope="module")
def trl(folder: Path) -> None:
    """TRL in an environment of its own, for the benchmarks that race it."""
    # Imported here, as it imports torch, which the processes that divide the tests need not.
    from benchmarks.vs_trl.sides import make_environment

    make_environment(folder / TRL.partition("/bin")[0])


def run(folder: Path, module: str, *arguments: str) -> str:
    """Output of the module. It has to succeed; what it leaves running is ended."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    mark = f"{module} {os.getpid()}"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: mark}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
    finally:
        end_marked(mark)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def check(folder: Path, name: str) -> None:
    """Runs a benchmark at its smallest size; it prints figures, none of which is an error."""
    printed = run(folder, f"benchmarks.{name}", *SMALLEST[name])
    if name == "gpu.models":
        return
    assert any(letter.isdigit() for letter in printed)
    if name.startswith("gpu."):
        kept = folder / "runs/gpu" / f"{name.removeprefix('gpu.')}.jsonl"
        rows = [json.loads(line) for line in kept.read_text().splitlines()[1:]]
        wrong = [row for row in rows if "error" in row and row["what"].partition(" ")[2] not in NEEDS_GPU]
        assert rows
        assert not wrong


@pytest.mark.parametrize("name", sorted(QUICK))
def test_it_runs(folder: Path, name: str) -> None:
    check(folder, name)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(set(SMALLEST) - QUICK))
def test_it_runs_too(folder: Path, request: pytest.FixtureRequest, name: str) -> None:
    if made := NEEDS.get(name):
        request.getfixturevalue(made)
    check(folder, name)


@pytest.mark.exhaustive
def test_the_learners_other_part_runs(folder: Path) -> None:
    assert run(folder, "benchmarks.learner", "batching", "--rounds", "1", "--samples", "8")
