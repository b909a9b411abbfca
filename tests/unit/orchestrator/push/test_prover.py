"""A push is proved by what its replicas compute."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.push.prover import PUSHES_WITHOUT_PROOF, Prover, PushDisproved
from orchestrator.push.prover import make_prover as configured
from orchestrator.push.pusher import WeightPusher
from orchestrator.push.tolerance import Tolerance
from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.weight_transfer.place import Place
from quartet.weight_transfer.probe import Probe, probe_sequences
from quartet.weight_transfer.registry import Applicant, Ticket
from quartet.wire.codec import Floats, Ints, pack_floats, pack_sequences
from services.rollout.newcomer import _receive
from tests.newcomers import nobody_looks
from tests.unit.fake_fleet import PUSH, FakeSource, Fleet, make_pusher
from tests.unit.fakes import make_config

SEQUENCES = probe_sequences(64, 128)


def make_prover(source: FakeSource, every: int = 3) -> Prover:
    return Prover(source, SEQUENCES, Tolerance(1e-3, 1e-3), every=every)


def test_the_sequences_are_the_same_for_every_run_and_fit_the_model() -> None:
    again = probe_sequences(64, 128)
    assert [row.tolist() for row in again] == [row.tolist() for row in SEQUENCES]
    assert max(row.max() for row in SEQUENCES) < 64
    # One token more is sampled after them.
    assert {len(row) for row in probe_sequences(64, 8)} == {7}


async def cannot_score(sequences: Sequence[Ints]) -> list[Floats]:
    raise RuntimeError("out of memory")


async def proved(source: FakeSource, fleet: Fleet, every: int, *, last: int, joins_at: int) -> list[int]:
    """The versions up to `last` whose push is proved; replica c joins before version `joins_at`."""
    pusher, versions = make_pusher(fleet, prover=make_prover(source, every=every)), []
    for version in range(1, last + 1):
        if version == joins_at:
            fleet.add(c=1)
        fleet.phases.clear()
        await pusher.push(version)
        assert fleet.phases in (PUSH, [*PUSH, "probe"])
        if "probe" in fleet.phases:
            versions.append(version)
    return versions


async def test_the_first_two_pushes_a_change_of_members_and_every_third_are_proved(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    assert await proved(source, fleet, 3, last=8, joins_at=5) == [1, 2, 5, 8]
    assert fleet.engines["c"].calls.count("score") == 2


async def test_without_a_period_only_the_first_two_and_changes_of_members_are_proved(source: FakeSource) -> None:
    assert await proved(source, Fleet(source, a=1), 0, last=59, joins_at=50) == [1, 2, 50]


@pytest.mark.parametrize(
    ("dtype", "weights", "tolerances", "every"),
    [
        ("float32", {}, (1e-3, 1e-4), 40),
        ("bfloat16", {}, (0.25, 0.05), 40),
        ("bfloat16", {"prove_tolerance": 0.02}, (0.02, 0.02), 40),
        ("float32", {"prove_every": 0}, (1e-3, 1e-4), 0),
    ],
)
def test_a_prover_as_it_is_configured(
    policy_folder: Path,
    source: FakeSource,
    dtype: str,
    weights: dict[str, Any],
    tolerances: tuple[float, float],
    every: int,
) -> None:
    policy = {"model": str(policy_folder), "dtype": dtype, "optimizer": {"learning_rate": 0.1}, "zero_stage": 1}
    config = make_config(policy_folder, policy=policy, weights=weights)
    model = common_pb2.ModelInfo(vocab_size=96, max_length=128)
    prover = configured(config, source, model, 64)
    before = prover._tolerance.now
    prover._tolerance.learn(0.0)
    assert ((before, prover._tolerance.now), prover._every) == (tolerances, every)
    assert [row.tolist() for row in prover._sequences] == [row.tolist() for row in SEQUENCES]
    assert max(row.max() for row in configured(config, source, model, None)._sequences) >= 64


async def test_a_replica_that_computes_something_else_fails_the_push(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    pusher = make_pusher(fleet, prover=make_prover(source, every=1))
    await pusher.push(1)
    fleet.engines["b"].off_by = 5e-4  # within the tolerance
    await pusher.push(2)
    fleet.engines["b"].off_by = 0.25
    fleet.phases.clear()
    expected = (
        r"^version 3: b computes with other weights than were pushed: log-probs of 30 fixed tokens differ from the "
        r"learner's by 0.25 nats in the mean and 0.25 at most; the mean is 0.25 of their spread, tolerance "
        r"0.001; these got no weights: lm_head$"
    )
    with pytest.raises(PushDisproved, match=expected):
        await pusher.push(3)
    assert fleet.phases == [*PUSH, "probe"]  # not tried again: that would not mend it


async def test_a_push_reports_what_its_proof_measured(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    fleet.engines["b"].off_by = 5e-4
    pusher = make_pusher(fleet, prover=make_prover(source, every=0))
    measured = [(await pusher.push(version)).difference for version in (1, 2, 3)]
    assert measured == [pytest.approx(5e-4, rel=1e-3)] * 2 + [None]
    for member in fleet.members.values():  # of the second push, as the third was not proved
        assert member.proved
        assert (member.proved.policy_version, member.proved.difference) == (2, measured[1])


def test_the_unit_of_differences_is_the_spread_of_the_log_probs() -> None:
    expected = [np.asarray([0.0, -40.0] * 15, np.float32)]  # a standard deviation of 20
    probe = Probe([np.zeros(31, np.int32)], expected, tolerance=0.05)
    for nats, measured in ((0.75, 0.0375), (1.5, 0.075)):
        assert probe.measure([expected[0] + np.float32(nats)]) == pytest.approx(measured)
    assert probe.disagreement([expected[0] + np.float32(0.75)]) == ""
    assert probe.disagreement([expected[0] + np.float32(1.5)]) == (
        "computes with other weights than were pushed: log-probs of 30 fixed tokens differ from the learner's by 1.5 "
        "nats in the mean and 1.5 at most; the mean is 0.075 of their spread, tolerance 0.05; if engine and learner "
        "only round so differently, raise weights.prove_tolerance"
    )
    assert probe.disagreement([expected[0] * np.float32("nan")]).endswith("tolerance 0.05; some are not finite")
    assert Probe([], [np.asarray([-4.0, -4.5], np.float32)], 0.05).spread == 1


async def test_the_first_proof_shows_how_differently_engine_and_learner_round(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    pusher = make_pusher(fleet, prover=Prover(source, SEQUENCES, Tolerance(1e-4, 1e-3), every=1))
    for version, off_by in enumerate([0.00006, 0.00029], 1):  # 5 times 0.00006 is 0.0003
        fleet.engines["b"].off_by = off_by
        await pusher.push(version)
    fleet.engines["b"].off_by = 0.00032
    with pytest.raises(
        PushDisproved, match=r"^version 3: b computes .* by 0.00032 nats in the mean.*, tolerance 0.0003\d*; these"
    ):
        await pusher.push(3)


async def test_numbers_that_are_none_prove_nothing(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    fleet.engines["a"].off_by = float("nan")
    with pytest.raises(PushDisproved, match=r"by nan nats in the mean"):
        await make_pusher(fleet, prover=make_prover(source)).push(1)


@pytest.mark.parametrize("answers", [False, True])
async def test_a_replica_that_gives_no_proof_costs_nothing_but_the_proof_that_it_owes(
    source: FakeSource, answers: bool
) -> None:
    fleet = Fleet(source, a=1, b=1)
    score = fleet.engines["b"].score
    if answers:
        fleet.engines["b"].score = cannot_score  # type: ignore[method-assign]
    else:
        fleet.mute.add(("b", "probe"))
    pusher = make_pusher(fleet, prover=make_prover(source))
    for version in range(1, PUSHES_WITHOUT_PROOF):
        assert (await pusher.push(version)).difference is None  # what the other measured is no proof of this one
        assert not any(member.proved for member in fleet.members.values())
    reason = "probe: RuntimeError: out of memory" if answers else "did not answer"
    with pytest.raises(PushDisproved, match=f"no proof in 3 pushes in a row: b: {reason}"):
        await pusher.push(PUSHES_WITHOUT_PROOF)
    fleet.mute.clear()
    fleet.engines["b"].score = score  # type: ignore[method-assign]
    for later in (1, 2):
        await pusher.push(PUSHES_WITHOUT_PROOF + later)
    fleet.phases.clear()
    await pusher.push(PUSHES_WITHOUT_PROOF + 3)
    assert "probe" not in fleet.phases


async def test_the_proof_that_a_dead_replica_owes_is_given_by_those_that_are_left(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    pusher = make_pusher(fleet, prover=make_prover(source, every=0))
    for version in (1, 2):
        await pusher.push(version)
    fleet.add(c=1)
    fleet.mute.add(("c", "probe"))
    assert (await pusher.push(3)).difference is None
    fleet.remove("c")
    assert (await pusher.push(4)).difference is not None
    assert (await pusher.push(5)).difference is None


async def ticket_of(pusher: WeightPusher, newcomer: str) -> Ticket:
    """The ticket with which this newcomer gets the weights."""
    taken: dict[str, Ticket] = {}

    async def deliver(tickets: dict[str, Ticket | None]) -> None:
        taken.update({name: ticket for name, ticket in tickets.items() if ticket})

    await pusher.add_newcomers({newcomer: Applicant(1, Place("m"))}, deliver, nobody_looks)
    return taken[newcomer]


async def test_a_newcomer_is_let_in_when_it_computes_what_was_pushed(source: FakeSource) -> None:
    """Compared with what a member computes: the learner may have trained on."""
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet, prover=make_prover(source))
    await pusher.push(1)
    fleet.add(b=1)
    ticket = await ticket_of(pusher, "b")
    assert await _receive(fleet.members["b"], ticket, fleet.lease) == ""
    assert fleet.engines["b"].calls[-1] == "score"
    fleet.engines["b"].off_by = 0.25
    told = await _receive(fleet.members["b"], ticket, fleet.lease)
    assert "computes with other weights than were pushed" in told


async def test_a_newcomer_is_compared_with_a_member_that_scores_and_else_with_none(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    pusher = make_pusher(fleet, prover=make_prover(source))
    await pusher.push(1)
    for failing, compared in (("a", True), ("b", False)):
        fleet.engines[failing].score = cannot_score  # type: ignore[method-assign]
        assert ((await ticket_of(pusher, f"after {failing}")).probe is not None) == compared


async def test_a_newcomer_is_not_compared_with_a_replica_that_missed_the_push(source: FakeSource) -> None:
    """The newcomer would be refused for ever, the only replica that could serve the run if all that took the push
    have died since."""
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet, prover=make_prover(source))
    fleet.afterwards = {"discover": lambda: fleet.add(late=1)}
    assert (await pusher.push(1)).replicas == ("a",)
    fleet.remove("a")
    fleet.engines["late"].off_by = 0.25  # it holds older weights
    fleet.add(b=1)
    assert await _receive(fleet.members["b"], await ticket_of(pusher, "b"), fleet.lease) == ""
    assert fleet.versions == {"late": 0, "b": 1}


async def test_a_push_without_proof_costs_the_learner_nothing(source: FakeSource) -> None:
    asked = []

    class Learner:
        async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
            asked.append(len(sequences))
            return await source.score(sequences)

    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet, prover=Prover(Learner(), SEQUENCES, Tolerance(1e-3, 1e-3), every=3))
    for version in range(1, 8):
        await pusher.push(version)
    assert len(asked) == 3


async def test_learner_and_replicas_score_at_the_same_time(source: FakeSource) -> None:
    scoring = asyncio.Event()

    class Learner:
        async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
            await scoring.wait()
            return await source.score(sequences)

    async def ask(probe: pb.Probe) -> Sequence[pb.WeightReport]:
        scoring.set()
        return [pb.WeightReport(replica="a", ok=True, logprobs=pack_floats(await source.score(SEQUENCES)))]

    prover = Prover(Learner(), SEQUENCES, Tolerance(1e-3, 1e-3), every=3)
    prover.begin(1, ["a"])
    async with asyncio.timeout(60):
        await prover.prove(1, 1, ["a"], ask)


async def test_ids_that_the_model_does_not_have_are_named(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    probe = pb.Probe(sequences=pack_sequences([np.asarray([1, 99], np.int32)]))
    report = await fleet.members["a"].carry_out(pb.WeightPhase(timeout_s=1, lease=fleet.lease, probe=probe))
    assert not report.ok
    assert "99 is outside the vocabulary" in report.error
