"""Three PPO steps by `quartet train` through the four deployed services, two rollout replicas among them."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from orchestrator.deployment.listeners import Listener, listeners
from orchestrator.monitoring.metrics import read_metrics
from orchestrator.tracing.activity import PARTS
from orchestrator.tracing.shares import LOOPS
from protos import rollout_pb2 as pb
from services.rollout.sample import Sampling
from tests import plain
from tests.cluster import Quartet
from tests.commands import PATIENCE_S, Command
from tests.configuration import EVALUATED
from tests.pages import told_metrics
from tests.preloaded import program

STEPS = 3
EVERY_STEP = {
    *("score/mean", "score/std", "reward/mean", "kl/reference", "kl/coef"),
    *("policy/loss", "policy/sampled_entropy", "policy/approx_kl", "policy/ratio_mean", "policy/ratio_max"),
    *("policy/clip_fraction_low", "policy/clip_fraction_high", "policy/grad_norm", "policy/learning_rate"),
    *("policy/version", "policy/staleness"),
    *("mismatch/mean_abs", "mismatch/max_abs", "mismatch/kl", "mismatch/capped"),
    *("value/loss", "value/clip_fraction", "value/explained_variance", "value/grad_norm", "value/learning_rate"),
    *("response/length_mean", "response/length_max", "response/truncated"),
    *("tokens_per_s/generation", "tokens_per_s/training"),
    *(f"seconds/{stage}" for stage in ("generate", "score", "logprobs", "train", "push", "step", "wall")),
    *(f"wait/loop/{what}" for what in LOOPS),
    *(f"work/{part}" for part in PARTS),
}
EVALUATION = {"eval/score", "eval/score_low", "eval/score_high", "eval/kl", "eval/words", "seconds/evaluate"}


@dataclass(frozen=True)
class Ended:
    """A run that has ended well."""

    folder: Path
    version_before: int
    """Version of the policy that the replicas had before the run."""
    seen: set[Listener]
    """Ports of all the run's processes, and of the head's."""
    drivers: set[int]
    """The processes of `quartet train`."""


@pytest.fixture(scope="module")
async def ended(quartet: Quartet) -> Ended:
    """Started elsewhere than the cluster was."""
    elsewhere = quartet.folder / "elsewhere"
    shutil.copytree(quartet.folder / ".quartet", elsewhere / ".quartet")
    before = (await quartet.services.rollout.info(30)).policy_version
    log = elsewhere / "train.log"
    process = Command(elsewhere, log, "train", str(quartet.config))
    running = asyncio.create_task(asyncio.to_thread(process.wait, PATIENCE_S))
    folder = elsewhere / "runs" / "three-steps"
    metrics = folder / "metrics.jsonl"
    seen: set[Listener] = set()
    drivers: set[int] = set()
    looked_at_all = False
    while not running.done():
        # Its steps may take less time than a look: it waits for one when all its parts have been started.
        if hold := not looked_at_all and metrics.exists() and metrics.stat().st_size > 0:
            process.send_signal(signal.SIGSTOP)
        # This process has joined the head; the run's is below it.
        own = psutil.Process().children(recursive=True)
        drivers |= {process.pid for process in own}
        seen |= set(listeners([*quartet.cluster.processes(), *own]))
        if hold:
            process.send_signal(signal.SIGCONT)
            looked_at_all = True
        await asyncio.sleep(0.3)
    assert await running == 0, log.read_text()
    return Ended(folder, before, seen, drivers)


@pytest.fixture
def run(ended: Ended) -> Path:
    """The run's folder."""
    return ended.folder


def test_every_step_is_logged_once_with_all_that_is_measured(run: Path) -> None:
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line.keys() >= EVERY_STEP
    told = told_metrics()
    assert [name for name in {*chain(*lines)} - {"step", "time"} if not told.fullmatch(name)] == []
    for step in (0, 2, 3):  # before the first, every second, after the last
        assert lines[step].keys() >= EVALUATION
    assert not EVALUATION & lines[1].keys()
    assert np.isfinite([value for line in lines for value in line.values()]).all()


def test_the_policy_moves_and_its_version_rises_by_one_each_step(ended: Ended) -> None:
    before = ended.version_before
    _, *steps = read_metrics(ended.folder / "metrics.jsonl")
    # The push before the first step makes one version, each step another.
    assert [line["policy/version"] for line in steps] == [before + 2, before + 3, before + 4]
    assert [line["policy/staleness"] for line in steps] == [0, 0, 0]
    # Sampled from the reference's weights at first, and from others after an update. An estimate from few samples may
    # be small, but not as small as rounding.
    assert abs(steps[0]["kl/reference"]) < 1e-5 < abs(steps[1]["kl/reference"])
    # vLLM and learner agree on the weights of every step, pushed ones included.
    assert max(line["mismatch/max_abs"] for line in steps) < 1e-4


def test_the_trace_has_every_sample_once_in_each_stage(quartet: Quartet, run: Path) -> None:
    events = [event for event in json.loads((run / "trace.json").read_text()) if event["ph"] == "X"]
    samples = STEPS * quartet.raw["orchestrator"]["batch_size"]
    for stage in ("generate", "score", "reference", "value"):
        numbers = [e["args"]["sample"] for e in events if e["name"] == stage and "sample" in e["args"]]
        assert sorted(numbers) == list(range(samples)), stage
        held_out = [e["args"]["held_out"] for e in events if e["name"] == stage and "held_out" in e["args"]]
        # Evaluated three times; an evaluation needs no values.
        assert sorted(held_out) == sorted(list(range(EVALUATED)) * 3 * (stage != "value")), stage
    assert not [event for event in events if "error" in event["args"]]
    names = Counter(event["name"] for event in events)
    assert names["train"] == 2 * STEPS  # policy and critic
    assert names["stage"] == names["deliver"] == STEPS + 1  # also before the first step
    lanes = sorted((event["tid"], event["ts"], event["ts"] + event["dur"]) for event in events)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(lanes))


def test_shares_add_up_to_the_wall_clock(run: Path) -> None:
    lines = read_metrics(run / "metrics.jsonl")
    trace = json.loads((run / "trace.json").read_text())
    windows = [event for event in trace if event["name"].startswith("step ")]
    assert [window["args"]["step"] for window in windows] == [line["step"] for line in lines[1:]]
    for window, following in pairwise(windows):  # in microseconds
        assert window["ts"] + window["dur"] == pytest.approx(following["ts"], rel=0, abs=1)
    for line, window in zip(lines[1:], windows, strict=True):
        assert line["seconds/wall"] == pytest.approx(window["dur"] / 1e6, abs=2e-6)
        assert sum(line[f"wait/loop/{what}"] for what in LOOPS) == pytest.approx(1)
        for part in PARTS:
            waits = [value for name, value in line.items() if name.startswith(f"wait/{part}/")]
            assert line[f"work/{part}"] + sum(waits) == pytest.approx(1)
            assert 0 < line[f"work/{part}"] < 1


def test_a_run_opens_nothing_to_other_machines(ended: Ended) -> None:
    beyond = [listener for listener in ended.seen if not listener.on_loopback]
    print(f"{len(ended.seen)} listeners, {len(beyond)} off loopback")
    assert any(listener.process.startswith("ray::PolicyRank") for listener in ended.seen)
    assert ended.drivers & {listener.pid for listener in ended.seen}
    assert beyond == []


def test_evaluations_are_written_as_text(run: Path) -> None:
    files = sorted((run / "evaluations").iterdir())
    assert [file.name for file in files] == ["step-000000.jsonl", "step-000002.jsonl", "step-000003.jsonl"]
    rows = [json.loads(line) for line in files[-1].read_text().splitlines()]
    assert len(rows) == EVALUATED
    assert all(row["prompt"].startswith("w") and row["judges"].keys() == {"words"} for row in rows)
    assert list((run / "tensorboard").iterdir())


@pytest.mark.usefixtures("run")
async def test_all_replicas_end_with_the_last_version_and_the_same_bytes(quartet: Quartet, run: Path) -> None:
    last = read_metrics(run / "metrics.jsonl")[-1]["policy/version"]
    infos = (await quartet.replicas()).values()
    assert [info.policy_version for info in infos] == [last, last]
    assert len({info.weights_checksum for info in infos}) == 1
    assert all(info.weights_checksum and info.running == 0 for info in infos)
    reports = await quartet.services.rollout.update_weights(10, discover=pb.Discover())
    assert [report.policy_version for report in reports] == [last, last]
    assert (await quartet.critic.info(10)).last_step >= STEPS


async def test_the_saved_policy_is_the_one_that_is_served(quartet: Quartet, run: Path) -> None:
    prompts, _ = plain.random_pairs(20, seed=31, longest=30)
    stream = quartet.services.rollout.generate(prompts, Sampling(max_new_tokens=30, temperature=0), timeout_s=60)
    samples = sorted([sample async for some in stream for sample in some], key=lambda sample: sample.index)
    served = [sample.response_ids for sample in samples]
    assert plain.shortfall(plain.language_model(run / "policy"), prompts, served, 30) < 1e-4
    assert plain.shortfall(plain.language_model(quartet.policy), prompts, served, 30) > 1e-3


async def test_the_saved_policy_is_evaluated_as_the_served_one_is(quartet: Quartet, run: Path) -> None:
    """`quartet evaluate`, by the rollout service and by an engine of its own: equal seeds, equal samples."""

    # With vLLM imported, for the engine.
    python = program("rollout", Path(os.environ["RAY_TMPDIR"]))

    def evaluate(model: str) -> list[dict[str, Any]]:
        output = run / f"{Path(model).name}.jsonl"
        where = (str(quartet.config), "--model", model, "--split", "train[:6]", "--output", str(output))
        command = [str(python), "-m", "orchestrator.cli", "evaluate", *where]
        environment = os.environ | {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
        done = subprocess.run(
            command, cwd=quartet.folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        assert "score" in done.stdout
        return [json.loads(line) for line in output.read_text().splitlines()]

    models = ("current", str(run / "policy"))
    served, saved = await asyncio.gather(*(asyncio.to_thread(evaluate, model) for model in models))
    assert len(served) == len(saved) == 6
    for left, right in zip(served, saved, strict=True):
        assert left["response"] == right["response"]
        assert left["score"] == pytest.approx(right["score"], abs=1e-4)
