"""The verdict on a run under faults when it is done, by its files and by what its services hold."""

import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgpack
from safetensors.torch import load_file

from orchestrator.experience.experience import SCHEMA
from orchestrator.loop.checkpoint_folder import latest
from orchestrator.monitoring.metrics import read_metrics
from protos import rollout_pb2 as pb
from quartet.columns import Columns
from quartet.wire.backoff import Backoff, Deadline
from quartet.wire.errors import ServiceError
from tests.chaos.run import BATCH, MEMBERS, ChaosRun
from tests.commands import finished

Answer = TypeVar("Answer")


def wrong_steps(folder: Path, steps: int) -> list[str]:
    """Steps that were not measured exactly once, and versions that do not grow by one with each."""
    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        return ["no step was measured"]
    wrong = []
    if (measured := [int(line["step"]) for line in lines]) != list(range(1, steps + 1)):
        wrong.append(f"steps measured: {measured}, not 1 to {steps}")
    first = int(lines[0]["policy/version"]) - 1
    for line in lines:
        step = int(line["step"])
        if line["policy/version"] != first + step:
            wrong.append(f"step {step}: version {line['policy/version']}, not {first + step}")
        if line["samples/used_total"] != step * BATCH:
            wrong.append(f"step {step}: {line['samples/used_total']} samples used, not {step * BATCH}")
    return wrong


def wrong_samples(folder: Path, steps: int, staleness: int) -> list[str]:
    """Samples that were not trained on exactly once, and those of versions that are too old or too new."""
    first = int(read_metrics(folder / "metrics.jsonl")[0]["policy/version"]) - 1
    used: Counter[int] = Counter()
    wrong = []
    for step in range(1, steps + 1):
        path = folder / "journal" / f"step-{step:06d}.msgpack"
        if not path.exists():
            wrong.append(f"step {step}: not in the journal")
            continue
        columns = Columns.unpack(msgpack.unpackb(path.read_bytes())["columns"], SCHEMA)
        used.update(columns["number"].tolist())
        trains = first + step - 1
        for number, row in zip(columns["number"].tolist(), columns.rows("versions"), strict=True):
            versions = sorted(set(row.tolist()))
            if versions[0] < trains - staleness or versions[-1] > trains:
                wrong.append(f"step {step}, sample {number}: versions {versions} for version {trains}")
    for number in range(steps * BATCH):
        if used[number] != 1:
            wrong.append(f"prompt {number // MEMBERS}, member {number % MEMBERS}: used {used[number]} times")
    if others := sorted(number for number in used if number >= steps * BATCH):
        wrong.append(f"samples that the run never had room for: {others}")
    return wrong


async def wrong_services(run: ChaosRun, steps: int) -> list[str]:
    """Replicas that do not hold the last weights, and a critic that did not train every step once."""
    [first, *_] = read_metrics(run.folder / "metrics.jsonl")
    version = int(first["policy/version"]) - 1 + steps
    rollout, critic = run.quartet.services.rollout, run.quartet.critic
    # One whose engine stands still gets no requests, and is about to be replaced.
    told = await _answered(lambda: rollout.update_weights(10, discover=pb.Discover()))
    reports = [report for report in told if report.ok]
    wrong = [
        f"{report.replica}: version {report.policy_version}, not {version}"
        for report in reports
        if report.policy_version != version
    ]
    if len({report.timeline for report in reports}) > 1:
        wrong.append(f"replicas of several timelines: {[report.timeline for report in reports]}")
    last = latest(run.folder / "checkpoints")
    if last is None or last.state.first_critic_step is None:
        return [*wrong, "no checkpoint of a critic"]
    trained, expected = (await _answered(lambda: critic.info(10))).last_step, last.state.first_critic_step + steps
    return wrong + ([f"critic: step {trained}, not {expected}"] if trained != expected else [])


async def _answered(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer to a call, once the proxy that passes it on is there."""
    backoff = Backoff(Deadline(60))
    while True:
        try:
            return await ask()
        except ServiceError as error:
            await backoff.wait(error)


def differs_from_its_replay(run: ChaosRun, staleness: int, steps: int) -> list[str]:
    """Trains once more from the first checkpoint on the journal's samples, without a fault: the same weights follow,
    bit for bit, if each step was trained once and as a whole, and the same measures of the critic's steps."""
    again = ChaosRun(run.quartet, f"{run.name}-replay", staleness)
    (again.folder / "checkpoints").mkdir(parents=True)
    shutil.copytree(run.folder / "checkpoints" / "step-000000", again.folder / "checkpoints" / "step-000000")
    shutil.copytree(run.folder / "journal", again.folder / "journal")
    again.write(steps)
    code, told = finished(run.quartet.folder, "train", str(again.config), "--resume")
    if code:
        return [f"the replay ended with {code}: {told[-2000:]}"]
    actual, wanted = (load_file(one.folder / "policy" / "model.safetensors") for one in (run, again))
    wrong = [
        f"{name}: differs from the replay's" for name in wanted if not bool((actual[name] == wanted[name]).all())
    ]
    return wrong + other_values(*(read_metrics(one.folder / "metrics.jsonl") for one in (run, again)))


def other_values(actual: Sequence[Mapping[str, float]], wanted: Sequence[Mapping[str, float]]) -> list[str]:
    """Measures of the critic's steps that differ from the replay's; its weights are compared by them."""
    return [
        f"step {int(line['step'])}: {name} {line.get(name)}, and {value} in the replay"
        for line, replayed in zip(actual, wanted, strict=False)
        for name, value in replayed.items()
        if name.startswith("value/") and line.get(name) != value
    ]
