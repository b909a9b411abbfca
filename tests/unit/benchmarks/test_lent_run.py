"""The plan for a lent machine goes through stages that fail, hang and are cut off, and loses no figure."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ended import marked
from benchmarks.figures import KEPT, append, mend, read
from benchmarks.lent.ledger import NAME, Ledger
from benchmarks.lent.report import report
from benchmarks.lent.run import LEAST_S, Command, run
from benchmarks.lent.stages import STAGES, Stage, at_least, at_most

ROOT = Path(__file__).parents[3]
FIGURE = "from benchmarks.figures import keep\nkeep('row', {'speed': 3.5})\n"
ESCAPE = "import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'],"
HANG = f"{FIGURE}{ESCAPE} start_new_session=True)\nprint(p.pid, flush=True)\ntime.sleep(300)\n"
START_S = 5
"""Seconds of a command's own start, with a look at the GPU, and between two stages."""
PROGRAMS = {
    "good": FIGURE + "print('all went well')\n",
    "bad": FIGURE + "raise SystemExit('the reason')\n",
    "hollow": "from benchmarks.figures import keep\nkeep('row', {'error': 'no memory'})\n",
    "hang": HANG,
}


def stage(name: str, **fields: Any) -> Stage:
    return Stage(name, f"lent_{name}", (), (), expected_s=1, limit_s=60, **fields)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for figures; modules of the names above can be imported."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for name, text in PROGRAMS.items():
        (modules / f"lent_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setattr("benchmarks.lent.run.gpus", lambda: "")
    kept = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "out"
    signal.signal(signal.SIGTERM, kept)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read(folder / NAME) if record["kind"] == kind]


def outcomes(folder: Path) -> list[tuple[str, str]]:
    return [(record["stage"], record["outcome"]) for record in records(folder, "ended")]


def test_each_stage_has_its_outcome_and_those_after_it_go_on(folder: Path) -> None:
    names = ("bad", "hollow", "good")
    status = run(Command(60, folder, copy=folder / "copy"), [stage(name) for name in names])
    assert status == 1
    assert outcomes(folder) == [("bad", "failed"), ("hollow", "failed"), ("good", "done")]
    assert [record["tail"].strip() for record in records(folder, "ended")] == ["the reason", "", "all went well"]
    assert [(one["stage"], one.get("speed")) for one in records(folder, "figure")] == [
        ("bad", 3.5),
        ("hollow", None),
        ("good", 3.5),
    ]
    assert (folder / "copy" / NAME).read_bytes() == (folder / NAME).read_bytes()
    assert "the reason" in (folder / "log.txt").read_text()


def test_a_stage_that_hangs_is_killed_with_what_left_its_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.lent.run.CPU_S", 3.0)
    assert run(Command(60, folder), [stage("hang"), stage("good")]) == 1
    assert outcomes(folder) == [("hang", "too slow"), ("good", "done")]
    assert [one["stage"] for one in records(folder, "figure")] == ["hang", "good"]
    child = int(records(folder, "ended")[0]["tail"])
    assert not alive(child)
    assert run(Command(60, folder), [stage("hang")]) == 0
    assert len(records(folder, "begun")) == 2


def test_the_end_of_a_commands_time_cuts_a_stage_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lent.run.LEAST_S", 1.0)
    assert run(Command(4, folder), [stage("hang")]) == 0
    assert outcomes(folder) == [("hang", "cut off")]


def test_what_was_over_before_counts_as_the_commands_time(folder: Path) -> None:
    assert run(Command(600, folder, spent=400), [stage("good")]) == 0
    assert run(Command(6, folder / "other", spent=15), [stage("good")]) == 0
    (begun,) = records(folder, "begun")
    assert 190 <= begun["limit_s"] <= 195
    assert [one["why"] for one in records(folder / "other", "skipped")] == ["it takes 5 s, and 0 s are left"]


def test_the_installation_of_a_part_counts_too(tmp_path: Path) -> None:
    (tmp_path / "store" / "project").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase $1 in *install.py) sleep 2;; *) echo "$@";; esac\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "QUARTET_LENT": str(tmp_path / "store")}
    command = ["sh", str(ROOT / "benchmarks" / "lent" / "run.sh"), "--seconds", "590"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    *_, option, spent, seconds, given = done.stdout.split()
    assert (option, seconds, given) == ("--spent", "--seconds", "590")
    assert 1 <= int(spent) <= 30


def test_a_stage_that_was_cut_off_comes_last_and_is_tried_once_more(folder: Path) -> None:
    ledger, stages = Ledger([folder / NAME]), [stage("bad"), stage("good")]
    ledger.add("begun", stage="bad", mark="of a command that was killed")
    run(Command(60, folder), stages)
    assert outcomes(folder) == [("good", "done"), ("bad", "failed")]
    ledger.add("again", stage="good")
    for _ in range(2):
        ledger.add("begun", stage="good", mark="of a command that was killed")
    run(Command(60, folder), stages)
    (skipped,) = records(folder, "skipped")
    assert skipped["why"] == "it was cut off 2 times; --again runs it once more"
    run(Command(60, folder, again=("good",)), stages)
    assert outcomes(folder)[2:] == [("good", "done")]


def hanging(folder: Path) -> subprocess.Popen[bytes]:
    """A command of its own, whose stage hangs."""
    program = (
        "from pathlib import Path; from benchmarks.lent import run; from benchmarks.lent.stages import Stage;"
        f"run.run(run.Command(60, Path({str(folder)!r})), [Stage('hang', 'lent_hang', (), (), 1, 60)])"
    )
    path = f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"
    return subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path})


def test_what_a_killed_command_left_is_ended_by_the_next(folder: Path) -> None:
    process = hanging(folder)
    eventually(lambda: (folder / NAME).exists() and records(folder, "figure"))
    mark = records(folder, "begun")[0]["mark"]
    eventually(lambda: len(marked(mark)) == 2)
    process.kill()
    process.wait()
    assert len(marked(mark)) == 2
    assert Path(f"/tmp/l-{mark[:8]}").is_dir()
    run(Command(60, folder), [stage("good")])
    assert marked(mark) == set()
    assert not Path(f"/tmp/l-{mark[:8]}").exists()
    assert [one["what"] for one in records(folder, "figure")] == ["row", "row"]


def test_a_stage_that_needs_a_larger_gpu_is_left_out_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lent.run.gpus", lambda: "NVIDIA H100 80GB HBM3, 81559 MiB, 580.159.04")
    run(Command(60, folder, device="cuda"), [stage("bad", gib=100.0), stage("good", gib=79.0)])
    (skipped,) = records(folder, "skipped")
    assert (skipped["stage"], skipped["why"]) == ("bad", "it needs a GPU of 100 GiB, and this one has 80")
    assert outcomes(folder) == [("good", "done")]


def test_models_that_one_stage_made_are_read_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.models import make

    monkeypatch.setenv(KEPT, str(tmp_path / "kept"))
    first = make(tmp_path / "first", "tiny", "float32")
    written = (first / "model.safetensors").stat()
    (tmp_path / "second").mkdir()  # as a temporary folder is
    second = make(tmp_path / "second", "tiny", "float32")
    assert (second / "model.safetensors").stat() == written
    assert {file.name for file in second.iterdir()} == {file.name for file in first.iterdir()}
    reward = make(tmp_path / "reward", "tiny", "float32", reward=True)
    assert (reward / "model.safetensors").stat() != written


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / NAME
    append(path, {"kind": "figure", "what": "first"})
    with path.open("a") as file:
        file.write('{"kind": "fig')
    assert [one["what"] for one in read(path)] == ["first"]
    mend(path)
    append(path, {"kind": "figure", "what": "second"})
    assert [one["what"] for one in read(path)] == ["first", "second"]
    assert Ledger([path, tmp_path / "other" / NAME]).records == read(tmp_path / "other" / NAME)


def test_the_report_puts_figures_beside_those_expected(tmp_path: Path) -> None:
    goals = (*at_least("push", gib_s=10), *at_most("push", s=0.15))
    plan = [stage("good", goals=goals), stage("bad"), stage("hang")]
    path = tmp_path / NAME
    ledger = Ledger([path])
    ledger.add("run", device="cuda", machine="a GPU", seconds=60)
    ledger.add("begun", stage="good", mark="1", limit_s=60)
    append(path, {"kind": "figure", "stage": "good", "what": "push of 3 GB", "gib_s": 12.0, "s": 0.2})
    ledger.add("ended", stage="good", outcome="done", s=4.0, tail="")
    ledger.add("begun", stage="bad", mark="2", limit_s=60)
    ledger.add("ended", stage="bad", outcome="failed", s=1.0, tail="the reason\n")
    ledger.add("skipped", stage="hang", why="not installed: vllm")
    told = report(path, plan)
    assert "push of 3 GB: gib_s 12 (reached: at least 10), s 0.2 (MISSED: at most 0.15)" in told
    assert "bad: failed after 1 s\n    | the reason" in told
    assert "hang: skipped, not installed: vllm" in told
    assert told.startswith("cuda: a GPU\n\n")


def test_each_way_of_a_step_is_compared_with_trls_last_figure(tmp_path: Path) -> None:
    path = tmp_path / NAME
    Ledger([path]).add("run", device="cuda", machine="a GPU", seconds=60)
    for name, what, rate in (
        ("step 1.5B", "1.5B Quartet", 30.0),
        ("step 1.5B", "1.5B Quartet, ahead", 24.0),
        ("TRL's step 1.5B", "1.5B TRL, so far", 20.0),
        ("TRL's step 1.5B", "1.5B TRL", 12.0),
    ):
        append(path, {"kind": "figure", "stage": name, "what": what, "samples_s": rate})
    told = report(path, [])
    assert "1.5B Quartet over TRL, samples/s: 2.50 " in told
    assert "1.5B Quartet, ahead over TRL, samples/s: 2.00 " in told


def test_the_plan_is_in_order_and_fits_the_benchmarks() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names)
    # A start of the machine of 90 s and 30 s for each of four parts: the first four, on a card of 80 GB too.
    assert sum(stage.expected_s for stage in STAGES[:4]) <= 900 - 90 - 4 * 30
    # The step and TRL's in one command after an installation of 15 s, also if the step is cut off at its limit.
    assert names[:2] == ["step 1.5B", "TRL's step 1.5B"]
    begins, room = 15 + STAGES[0].limit_s + START_S, 590 - LEAST_S
    assert begins + STAGES[1].expected_s <= room
    assert all(stage.gib < 79 for stage in STAGES[:4])
    assert all(stage.expected_s < stage.limit_s < 590 for stage in STAGES)
    assert all((ROOT / f"{stage.module.replace('.', '/')}.py").is_file() for stage in STAGES)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def eventually(condition: Callable[[], object], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
