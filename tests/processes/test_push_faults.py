"""Members of a push that die or freeze at every point of it. Each test prints how long the push took in all.

The members are processes of their own with the replica's real part in a push over real gloo; they are ended with
SIGKILL and frozen with SIGSTOP. "nccl" is NCCL's code over gloo (tests/carried.py). The same through Serve and vLLM,
where it takes minutes: test_faults.py.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.weights import WeightsConfig
from orchestrator.push.pusher import PushReport, WeightPusher
from orchestrator.push.replicas import ANSWER_S, ASK_EVERY_S, MISSED
from protos import rollout_pb2 as pb
from quartet.weight_transfer.registry import Applicant, Ticket
from quartet.wire.errors import Internal, Unavailable
from tests.carried import place
from tests.members import LEASE, Fleet, Hook, weights
from tests.newcomers import nobody_looks
from tests.sources import LocalSource
from tests.unit.fake_cuda import FOLDER, FakeGpu

MIB = 64
STALL_S = 2.0
CONTROL_S = 2.0
TIMEOUT_S = 8.0
COMMIT_S = 3.0


class Stage:
    """Three members at version 1, and the pusher that brought them there."""

    def __init__(
        self,
        backend: str,
        stall_s: float = STALL_S,
        timeout_s: float = TIMEOUT_S,
        control_s: float = CONTROL_S,
        commit_s: float = COMMIT_S,
    ) -> None:
        self.backend = backend
        self.place = place(backend, "newcomer")
        self.fleet = Fleet(backend)
        # Each tensor a bucket of its own.
        # The digest that a GPU would compute takes a CPU much longer than its own.
        self._mib = 4 if backend in ("cuda-ipc", "nccl") else MIB
        options: dict[str, Any] = {"bucket_bytes": self._mib << 17, "stall_s": stall_s, "cuda": FakeGpu.of(backend)}
        self.source = LocalSource(weights(0, self._mib), backend=backend, **options)
        config = WeightsConfig(
            timeout_s=timeout_s,
            stall_s=stall_s,
            control_s=control_s,
            commit_s=commit_s,
            attempts=3,
            patience_s=30,
        )
        self.pusher = WeightPusher(self.fleet, self.source, backend, config)  # type: ignore[arg-type]

    async def push(self, version: int) -> PushReport:
        """Other weights each time; everyone who answers afterwards holds the bytes that were sent."""
        self.source.tensors = weights(version, self._mib)
        report = await self.pusher.push(version)
        print(f"\npush of version {version}: {report.seconds:.2f} s, attempt {report.attempts}")
        return report

    def send(self, name: str, number: signal.Signals) -> Hook:
        """Sends a member a signal, when it is called."""

        async def hook() -> None:
            self.fleet.members[name].signal(number)

        return hook


@asynccontextmanager
async def three(backend: str, **deadlines: float) -> AsyncIterator[Stage]:
    stage = Stage(backend, **deadlines)
    await stage.fleet.add("a", "b", "c")
    assert (await stage.push(1)).replicas == ("a", "b", "c")
    yield stage
    await stage.fleet.end()


@pytest.fixture(
    params=["gloo", "ipc", *(pytest.param(its, marks=pytest.mark.exhaustive) for its in ("cuda-ipc", "nccl"))]
)
async def stage(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Stage]:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    async with three(request.param) as stage:
        yield stage


FAULTS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
PHASES = ["discover", "prepare", "transfer", "commit"]
SILENCE_S = {"discover": CONTROL_S, "prepare": STALL_S + CONTROL_S, "transfer": TIMEOUT_S, "commit": COMMIT_S}
"""A frozen member is found by the silence of its phase, which has a deadline of its own, or sooner by questions
meanwhile."""
PATIENT = {"stall_s": 60.0, "control_s": 62.0, "timeout_s": 240.0, "commit_s": 60.0}
"""Deadlines that a death is not waited for, since a dead member's connections break at once."""
SOON_S = 40.0


MORE = pytest.mark.exhaustive
# Each phase, each fault and each backend; a transfer that a member freezes in has tests of its own below.
ALWAYS = {("discover", "killed", "gloo"), ("prepare", "frozen", "gloo"), ("commit", "killed", "ipc")}
ALWAYS |= {("transfer", "killed", "cuda-ipc"), ("transfer", "killed", "nccl")}
LOST = [
    pytest.param(phase, fault, backend, marks=() if (phase, fault, backend) in ALWAYS else MORE)
    for phase in PHASES
    for fault in FAULTS
    for backend in ("gloo", "ipc", "cuda-ipc", "nccl")
]


@pytest.mark.parametrize(("phase", "fault", "backend"), LOST)
async def test_a_member_lost_before_a_phase_costs_one_attempt_at_most(
    phase: str, fault: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    async with three(backend, **(PATIENT if fault == "killed" else {})) as stage:
        stage.fleet.before = {phase: stage.send("b", FAULTS[fault])}
        report = await stage.push(2)
        assert report.replicas == ("a", "c")
        assert report.attempts <= 2
        assert report.seconds < (SOON_S if fault == "killed" else SILENCE_S[phase] + CONTROL_S + 16)
        assert await stage.fleet.versions() == {"a": 2, "c": 2}
        # And on it goes, at once.
        again = await stage.push(3)
        assert (again.attempts, again.replicas) == (1, ("a", "c"))
        assert await stage.fleet.versions() == {"a": 3, "c": 3}


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=MORE)])  # ipc has no middle
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_member_lost_in_the_middle_of_the_transfer_costs_one_attempt(fault: str, backend: str) -> None:
    """A death is noticed at once, a silence at weights.stall_s and not at the end of the phase. Then the others leave
    the group, whatever they wait for."""
    patience = PATIENT | ({} if fault == "killed" else {"stall_s": STALL_S, "control_s": STALL_S + CONTROL_S})
    async with three(backend, **patience) as stage:
        stage.source.midway = lambda: stage.fleet.members["b"].signal(FAULTS[fault])
        report = await stage.push(2)
        assert (report.attempts, report.replicas) == (2, ("a", "c"))
        assert report.seconds < SOON_S
        assert await stage.fleet.versions() == {"a": 2, "c": 2}
        assert (await stage.push(3)).attempts == 1


@pytest.mark.parametrize(
    ("backend", "phase"),
    # What gloo has begun to send is lost at stall_s, which is not work's but a bucket's deadline.
    [("ipc", "commit"), pytest.param("ipc", "transfer", marks=MORE), pytest.param("gloo", "commit", marks=MORE)],
)
async def test_a_member_that_freezes_is_not_waited_for_as_long_as_the_work_may_take(backend: str, phase: str) -> None:
    """A large model's transfer and commit have deadlines of minutes. A member that stands still is found by its
    silence to questions that take no work."""
    async with three(backend, stall_s=120, timeout_s=240, commit_s=240) as stage:
        stage.fleet.before = {phase: stage.send("b", signal.SIGSTOP)}
        report = await stage.push(2)
        assert (report.attempts, report.replicas) == (2, ("a", "c"))
        assert report.seconds < 60
        assert await stage.fleet.versions() == {"a": 2, "c": 2}


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=MORE)])
@pytest.mark.parametrize("fault", FAULTS)
async def test_those_who_meet_one_that_is_lost_are_called_back_long_before_the_meetings_deadline(
    backend: str, fault: str
) -> None:
    """A death breaks connections, and at a meeting there are none yet."""
    async with three(backend, stall_s=300, control_s=10) as stage:
        await stage.fleet.add("d")  # a new membership
        stage.fleet.before = {"prepare": stage.send("b", FAULTS[fault])}
        report = await stage.push(2)
        assert (report.attempts, report.replicas) == (2, ("a", "c", "d"))
        assert report.seconds < 100
        assert await stage.fleet.versions() == {"a": 2, "c": 2, "d": 2}
        assert (await stage.push(3)).attempts == 1


async def test_a_phase_that_takes_long_is_no_silence() -> None:
    """The members are asked many times meanwhile, and answer."""
    async with three("ipc", commit_s=60) as stage:

        async def slow() -> None:
            stage.fleet.slow_s = (ASK_EVERY_S + ANSWER_S) * (MISSED + 1)

        stage.fleet.before = {"commit": slow}
        report = await stage.push(2)
        assert (report.attempts, report.replicas) == (1, ("a", "b", "c"))
        assert stage.fleet.phases.count("discover") > MISSED + 1


async def test_a_member_that_serve_is_stopping_does_not_hold_the_others_up_until_a_bucket_is_late() -> None:
    """The member lives and its connections are open, so those behind it in the broadcast wait for it. They are called
    back, roll back at once and are in the second attempt; the bucket's own deadline would be a minute."""
    async with three("gloo", stall_s=60, timeout_s=90) as stage:
        for version, name in ((2, "a"), (3, "b")):

            async def stop(name: str = name) -> None:
                stage.fleet.stopping.add(name)

            stage.fleet.before = {"transfer": stop}
            report = await stage.push(version)
            assert (report.attempts, name in report.replicas) == (2, False)
            assert report.seconds < 30
        assert await stage.fleet.versions() == {"c": 3}


@pytest.mark.parametrize(
    "stage", ["gloo", *(pytest.param(backend, marks=MORE) for backend in ("ipc", "cuda-ipc", "nccl"))], indirect=True
)
async def test_a_member_that_thaws_is_back_with_the_next_push(stage: Stage) -> None:
    """Meanwhile it serves the version it had, and says so."""
    stage.fleet.before = {"transfer": stage.send("b", signal.SIGSTOP)}
    assert (await stage.push(2)).replicas == ("a", "c")
    stage.fleet.members["b"].signal(signal.SIGCONT)
    async with asyncio.timeout(30):
        while await stage.fleet.versions() != {"a": 2, "b": 1, "c": 2}:
            await asyncio.sleep(0.1)
    assert (await stage.push(3)).replicas == ("a", "b", "c")
    assert await stage.fleet.versions() == {"a": 3, "b": 3, "c": 3}


async def test_a_newcomer_joins_between_pushes_and_one_that_dies_on_the_way_does_no_harm(stage: Stage) -> None:
    await stage.fleet.add("d", "e")

    async def join(tickets: dict[str, Ticket | None]) -> None:
        for name, ticket in tickets.items():
            assert ticket is not None
            steps = {"prepare": pb.Prepare, "transfer": pb.Transfer, "commit": pb.Commit}
            joining.append(asyncio.create_task(receive(name, ticket, steps)))

    async def receive(name: str, ticket: Ticket, steps: dict[str, Any]) -> None:
        for step, message in steps.items():
            phase = {step: message.FromString(getattr(ticket, step))}
            answer = await stage.fleet.members[name].carry_out(pb.WeightPhase(timeout_s=5, lease=LEASE, **phase))
            report = pb.WeightReport.FromString(answer)
            assert report.ok, report.error

    joining: list[asyncio.Task[None]] = []
    await stage.pusher.add_newcomers({"d": Applicant(1, stage.place)}, join, nobody_looks)
    await asyncio.gather(*joining)
    joining.clear()
    stage.fleet.members["e"].signal(signal.SIGSTOP)
    # Where weights are sent, the sender finds out; shared memory is open to any reader.
    with pytest.raises(Internal) if stage.backend in ("gloo", "nccl") else nullcontext():
        await stage.pusher.add_newcomers({"e": Applicant(1, stage.place)}, join, nobody_looks)
    stage.fleet.members["e"].signal(signal.SIGKILL)
    await asyncio.gather(*joining, return_exceptions=True)
    assert await stage.fleet.versions() == {"a": 1, "b": 1, "c": 1, "d": 1}
    report = await stage.push(2)
    assert (report.attempts, report.replicas) == (1, ("a", "b", "c", "d"))


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=MORE)])  # ipc has no group
async def test_the_group_of_a_newcomer_that_has_died_is_given_up_at_once(backend: str) -> None:
    """The deadlines are a minute at least; after them the learner would report a failure of its own."""
    async with three(backend, stall_s=60, control_s=60, timeout_s=240, commit_s=60) as stage:
        await stage.fleet.add("d", "e")
        joining: list[asyncio.Task[bytes]] = []

        async def deliver(tickets: dict[str, Ticket | None]) -> None:
            stage.fleet.members["e"].signal(signal.SIGKILL)
            prepare = pb.Prepare.FromString(tickets["d"].prepare)  # type: ignore[union-attr]
            phase = pb.WeightPhase(timeout_s=240, lease=LEASE, prepare=prepare)
            joining.append(asyncio.create_task(stage.fleet.members["d"].carry_out(phase)))

        async def first_death(_: Any) -> str:
            await asyncio.sleep(0.5)  # `d` waits for it by now
            return "e"

        applicants = {name: Applicant(1, stage.place) for name in "de"}
        with pytest.raises(Unavailable, match="e died while it joined"):
            await stage.pusher.add_newcomers(applicants, deliver, first_death)
        [answer] = await asyncio.gather(*joining)
        report = pb.WeightReport.FromString(answer)
        assert not report.ok
        assert "given up by its sender" in report.error
        assert (await stage.push(2)).attempts == 1
