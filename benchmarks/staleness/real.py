"""Random schedules with the real services: processes that are stopped for a while and killed, and the samples after.

One quartet of tiny models stays up. Each schedule is a run of `quartet train` of its own, at a random bound and
depth, with random moments at which a process is killed, and others at which one stands still.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import msgpack
import psutil
import yaml

from benchmarks.staleness.schedule import Outcome
from orchestrator.deployment.applications import status_of
from orchestrator.deployment.cluster import applications
from orchestrator.monitoring.metrics import JOURNAL, TRACE, read_metrics
from orchestrator.tracing.file import read_tail
from orchestrator.tracing.spans import STEPS as TRACK
from protos import rollout_pb2 as pb
from tests.cluster import SERVICES, Quartet
from tests.configuration import REPO

STEPS, BATCH = 6, 16
ORCHESTRATOR = "orchestrator"
KILLED = {
    ORCHESTRATOR: 3,
    "ray::ServeReplica:rollout": 2,
    "ray::Rank": 2,
    "ray::ServeReplica:critic": 2,
    "ray::ServeReplica:reward": 1,
    "ray::ServeController": 1,
}
"""Beginning of the command line of each kind of process that is killed -> its weight in the draw. The rank is the
policy's."""
STOPPED = ("ray::ServeReplica:", "ray::Rank", "VLLM::EngineCore", "ray::ProxyActor")
LIVES = 6
"""Most times that a run is started."""
LIFE_S = 300
REPLACED_S = 180


class RealSchedule:
    """One run with its kills and delays."""

    def __init__(self, quartet: Quartet, seed: int) -> None:
        self._quartet = quartet
        self._draw = draw = random.Random(seed)
        self.staleness = draw.choice([0, 1, 1, 2, 2, 4])
        self.depth = draw.randint(1, self.staleness) if self.staleness else 0
        victims = draw.choices(list(KILLED), list(KILLED.values()), k=draw.choice([1, 2]))
        self._kills = sorted((draw.randint(1, STEPS - 1), draw.uniform(0, 1), victim) for victim in victims)
        """Step that has to be done, seconds after that, and what is killed."""
        self._name = f"schedule-{seed}"
        self._folder = quartet.folder / "runs" / self._name
        self._file = quartet.folder / f"{self._name}.yaml"
        self._file.write_text(yaml.safe_dump(self._configured(draw.randint(1, 3))))
        self._log = quartet.folder / f"{self._name}.log"
        self.killed: list[str] = []

    def finish(self) -> Outcome:
        """Carries it out, and counts its samples."""
        self._await_services()
        outcome, over = Outcome(self.staleness, self.depth), threading.Event()
        delaying = threading.Thread(target=self._delay, args=(over,))
        delaying.start()
        try:
            while not self._live(first=outcome.restarts == 0):
                outcome.restarts += 1
                if outcome.restarts == LIVES:
                    raise RuntimeError(f"{self._name} does not end:\n{self._log.read_text()[-4000:]}")
        finally:
            over.set()
            delaying.join()
        self._count(outcome)
        return outcome

    def _await_services(self) -> None:
        """Returns when Serve has replaced all that earlier schedules killed, and found ill meanwhile."""
        end = time.monotonic() + REPLACED_S
        while time.monotonic() < end:
            with suppress(OSError):
                described = applications(self._quartet.cluster)
                if all(status_of(described.get(name)) == "RUNNING" for name in SERVICES):
                    return
            time.sleep(0.5)
        raise RuntimeError(f"Serve has not replaced what was killed within {REPLACED_S} s")

    def _configured(self, every: int) -> dict[str, Any]:
        raw: dict[str, Any] = self._quartet.raw
        section = raw["orchestrator"]
        # Everything is kept, so that all batches can be looked at in the end.
        checkpoint = section["checkpoint"] | {"every": every, "keep": 100}
        loop = {"max_staleness": self.staleness, "depth": self.depth or None}
        changed = {"name": self._name, "steps": STEPS, "batch_size": BATCH, "checkpoint": checkpoint, "loop": loop}
        return raw | {"orchestrator": section | changed}

    def _live(self, *, first: bool) -> bool:
        """Starts or resumes the run; True when it has ended, False if it failed or was killed."""
        command = [sys.executable, "-m", "orchestrator.cli", "train", str(self._file)]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command if first else [*command, "--resume"],
                cwd=self._quartet.folder,
                env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
        try:
            while self._kills and process.poll() is None:
                step, pause_s, name = self._kills[0]
                if not self._reached(step, process):
                    break
                time.sleep(pause_s)
                del self._kills[0]
                self._kill(name, process)
            return process.wait(LIFE_S) == 0
        finally:
            process.kill()
            process.wait()

    def _reached(self, step: int, process: subprocess.Popen[bytes]) -> bool:
        """Waits until a step is done; False if the run ends before."""
        metrics, end = self._folder / "metrics.jsonl", time.monotonic() + LIFE_S
        while process.poll() is None and time.monotonic() < end:
            if metrics.exists() and any(line["step"] >= step for line in read_metrics(metrics)):
                return True
            time.sleep(0.02)
        return False

    def _kill(self, name: str, process: subprocess.Popen[bytes]) -> None:
        victims = [psutil.Process(process.pid)] if name == ORCHESTRATOR else self._processes(name)
        if victims:
            with suppress(psutil.NoSuchProcess):
                self._draw.choice(victims).send_signal(signal.SIGKILL)
                self.killed.append(name.rpartition(":")[2])

    def _delay(self, over: threading.Event) -> None:
        """Lets processes stand still, one at a time, until the run is over."""
        draw = random.Random(self._name)
        while not over.wait(draw.expovariate(1 / 3)):
            if victims := self._processes(*STOPPED):
                victim = draw.choice(victims)
                with suppress(psutil.NoSuchProcess):
                    victim.suspend()
                    over.wait(min(draw.expovariate(1 / 0.4), 3))
                    victim.resume()

    def _processes(self, *names: str) -> list[psutil.Process]:
        """The cluster's processes whose command lines begin so, in the order of their age."""
        chosen = []
        for process in self._quartet.cluster.processes():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and " ".join(process.cmdline()).startswith(names):
                    chosen.append((process.create_time(), process))
        return [process for _, process in sorted(chosen, key=lambda each: each[0])]

    def _count(self, outcome: Outcome) -> None:
        used: Counter[int] = Counter()
        for line in read_metrics(self._folder / "metrics.jsonl"):
            if line["step"] < 1:
                continue
            trained_on = int(line["policy/version"]) - 1
            for number, spans in self._batch(int(line["step"])):
                used[number] += 1
                oldest = min(version for version, _, _ in spans)
                tokens = sum(end - start for _, start, end in spans)
                outcome.over_bound += trained_on - oldest > self.staleness
                outcome.ages.append(trained_on - oldest)
                outcome.token_ages.append(
                    sum((trained_on - version) * (end - start) for version, start, end in spans) / tokens
                )
        outcome.lost = sum(number not in used for number in range(STEPS * BATCH))
        outcome.doubled = sum(count - 1 for count in used.values())
        outcome.discarded = sum(number not in used for number in self._came())

    def _batch(self, step: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Number and spans of each sample that a step was trained on."""
        rows = msgpack.unpackb((self._folder / JOURNAL / f"step-{step:06d}.msgpack").read_bytes())["rows"]
        samples = [(int(row["number"]), pb.Sample.FromString(row["sample"])) for row in rows]
        return [(number, [(s.policy_version, s.start, s.end) for s in sample.spans]) for number, sample in samples]

    def _came(self) -> Sequence[int]:
        """Numbers of the samples that came after the last restart."""
        spans = read_tail(self._folder / TRACE)
        begun = max(span.ended for span in spans if span.track == TRACK and span.name == "start")
        return [
            int(span.args["sample"])
            for span in spans
            if span.track == "rollout" and span.began >= begun and "sample" in span.args and "error" not in span.args
        ]


def described(seed: int, schedule: RealSchedule, outcome: Outcome) -> str:
    """One line about a schedule that has ended."""
    counts = {name: getattr(outcome, name) for name in ("over_bound", "discarded", "lost", "doubled")}
    bound = f"s {schedule.staleness}, depth {schedule.depth}"
    ages = f"mean age {fmean(outcome.token_ages):.2f}, oldest {max(outcome.ages):.0f}"
    killed = ", ".join(schedule.killed) or "nothing"
    return f"schedule {seed}: {bound}; killed {killed}; resumed {outcome.restarts}; {ages}; {json.dumps(counts)}"
