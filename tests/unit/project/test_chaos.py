"""The random faults themselves: which are drawn, and that a run which lost or repeated something is found out."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from orchestrator.loop.state import TrainState
from protos import critic_pb2, rollout_pb2
from services.rollout.sample import FinishReason, Sample
from tests.chaos.driver import MOST_S, Outcome, Struck, over_bound
from tests.chaos.plan import KINDS, LED, MOMENTS, Fault, faults
from tests.chaos.run import BATCH
from tests.chaos.verdict import other_values, wrong_samples, wrong_services, wrong_steps
from tests.unit.experiences import Experience, collected
from tests.unit.fakes import make_prompts

STEPS, FIRST = 4, 7
"""Steps of a run, and the version that trains on the first."""


def test_a_seed_draws_the_same_faults_of_every_kind_and_moment() -> None:
    runs = list(faults(0, 400, 25))
    assert runs == list(faults(0, 400, 25))
    drawn = [fault for run in runs for fault in run]
    assert len(drawn) >= 400
    assert [fault.number for fault in drawn] == list(range(len(drawn)))
    assert {(fault.kind, fault.action) for fault in drawn} == {(k, a) for k in KINDS for a in ("kill", "freeze")}
    assert {fault.moment for fault in drawn} == {*MOMENTS, "start"}
    assert [run[0].moment for run in runs] == ["start"] * len(runs)


def test_a_resume_or_a_return_is_brought_about_by_a_fault_before_it() -> None:
    led = 0
    for run in faults(3, 400, 25):
        for before, fault in itertools.pairwise(run):
            if fault.moment in LED or fault.moment == "new":
                assert (before.kind, before.action) == (LED.get(fault.moment, fault.kind), "kill")
                led += 1
    assert led > 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of four steps as it should be; each batch but the first is of the version before the one that trains."""
    (tmp_path / "journal").mkdir()
    lines = []
    for step in range(1, STEPS + 1):
        lines.append({"step": step, "time": 1.0, "policy/version": FIRST + step, "samples/used_total": step * BATCH})
        version = FIRST + step - 1 - (step > 1)
        write(tmp_path, step, [row(number, version) for number in range((step - 1) * BATCH, step * BATCH)])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def row(number: int, version: int) -> Experience:
    ids = np.asarray([5, 6], np.int32)
    sample = Sample(0, ids, np.zeros(2, np.float32), FinishReason.LENGTH, ((version, 0, 2),))
    return Experience(number, make_prompts(1)[0], sample, 0.0, np.zeros(2, np.float32), np.zeros(2, np.float32))


def write(folder: Path, step: int, rows: list[Experience]) -> None:
    raw = {"columns": collected(rows).columns.pack()}
    (folder / "journal" / f"step-{step:06d}.msgpack").write_bytes(msgpack.packb(raw))


def edited(line: int, **fields: float) -> Callable[[Path], None]:
    """Changes a line of the metrics; by no fields, repeats it."""

    def edit(folder: Path) -> None:
        path = folder / "metrics.jsonl"
        lines = [json.loads(each) for each in path.read_text().splitlines()]
        lines[line : line + 1] = [lines[line] | fields] if fields else [lines[line]] * 2
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))

    return edit


def test_a_run_without_a_flaw_has_none(folder: Path) -> None:
    assert wrong_steps(folder, STEPS) + wrong_samples(folder, STEPS, 1) == []


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        (edited(2), r"^steps measured: \[1, 2, 3, 3, 4\], not 1 to 4$"),
        (edited(1, **{"policy/version": FIRST + 3}), rf"^step 2: version {FIRST + 3}, not {FIRST + 2}$"),
        (edited(3, **{"samples/used_total": 3 * BATCH}), rf"^step 4: {3 * BATCH} samples used, not {4 * BATCH}$"),
        (lambda folder: (folder / "metrics.jsonl").write_text(""), r"^no step was measured$"),
    ],
)
def test_steps_and_versions_that_are_wrong_are_named(folder: Path, flaw: Callable[[Path], None], said: str) -> None:
    flaw(folder)
    assert [line for line in wrong_steps(folder, STEPS) if re.search(said, line)]


def test_a_sample_that_was_used_twice_or_never_is_named(folder: Path) -> None:
    rows = [row(number, FIRST) for number in range(BATCH, 2 * BATCH)]
    rows[3] = row(0, FIRST)
    write(folder, 2, rows)
    assert wrong_samples(folder, STEPS, 1) == [
        "prompt 0, member 0: used 2 times",
        f"prompt {(BATCH + 3) // 2}, member {(BATCH + 3) % 2}: used 0 times",
    ]


def test_samples_that_are_too_old_or_not_there_are_named(folder: Path) -> None:
    assert len(wrong_samples(folder, STEPS, 0)) == 3 * BATCH
    write(folder, 1, [row(number, FIRST + 1) for number in range(BATCH)])
    assert wrong_samples(folder, STEPS, 1)[0] == f"step 1, sample 0: versions [{FIRST + 1}] for version {FIRST}"
    (folder / "journal" / "step-000003.msgpack").unlink()
    assert "step 3: not in the journal" in wrong_samples(folder, STEPS, 1)


@pytest.mark.parametrize(
    ("version", "trained", "said"),
    [
        (FIRST + STEPS, 3 + STEPS, []),
        (FIRST + STEPS - 1, 3 + STEPS, [f"b: version {FIRST + STEPS - 1}, not {FIRST + STEPS}"]),
        (FIRST + STEPS, 2 + STEPS, [f"critic: step {2 + STEPS}, not {3 + STEPS}"]),
        (FIRST + STEPS, 4 + STEPS, [f"critic: step {4 + STEPS}, not {3 + STEPS}"]),
    ],
)
async def test_services_without_the_last_step_are_named(
    folder: Path, version: int, trained: int, said: list[str]
) -> None:
    """The critic had trained three steps for another run."""
    (folder / "checkpoints/step-000002").mkdir(parents=True)
    state = TrainState(step=2, first_version=FIRST, first_critic_step=3)
    (folder / "checkpoints/step-000002/state.json").write_text(state.model_dump_json())

    async def reports(timeout_s: float, **phase: Any) -> list[rollout_pb2.WeightReport]:
        held = {"a": FIRST + STEPS, "b": version}
        return [rollout_pb2.WeightReport(replica=name, ok=True, policy_version=its) for name, its in held.items()]

    async def info(timeout_s: float) -> critic_pb2.CriticInfo:
        return critic_pb2.CriticInfo(last_step=trained)

    services = SimpleNamespace(rollout=SimpleNamespace(update_weights=reports))
    run: Any = SimpleNamespace(
        folder=folder, quartet=SimpleNamespace(services=services, critic=SimpleNamespace(info=info))
    )
    assert await wrong_services(run, STEPS) == said


def test_a_critic_that_trained_otherwise_than_in_the_replay_is_named() -> None:
    lines = [{"step": float(step), "value/loss": 0.5 / step, "seconds/step": float(step)} for step in (1, 2, 3)]
    assert other_values(lines, [line | {"seconds/step": 9.0} for line in lines]) == []
    other = [lines[0], lines[1] | {"value/loss": 0.75}, lines[2]]
    assert other_values(other, lines) == ["step 2: value/loss 0.75, and 0.25 in the replay"]


@pytest.mark.parametrize(
    ("kind", "gap_s", "returns", "said"),
    [
        ("reward", 1.0, 0, []),
        ("reward", MOST_S + 2, 0, [f"cost {MOST_S + 1:.1f} s, and may cost {MOST_S:g}"]),
        ("reference", 1.0, 2, ["cost 2 returns to a checkpoint, and may cost none"]),
        ("critic", 1.0, 1, []),
        ("proxy", MOST_S + 2, 1, []),
    ],
)
def test_a_frozen_replica_that_costs_too_much_is_named(
    kind: str, gap_s: float, returns: int, said: list[str]
) -> None:
    """A usual step takes a second. A critic has no other replica, and a proxy's cost is only measured."""
    struck = Struck(Fault(5, kind, "freeze", "step", 0.5, 0.0), [1], "after step 3", 0.0, gap_s, returns)
    assert over_bound(Outcome([struck], [], 9, 60.0, 1.0)) == [
        f"{struck.fault}, after step 3: {told}" for told in said
    ]
    assert struck.problems == said
