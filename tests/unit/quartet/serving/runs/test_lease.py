"""The lease of a run: one at a time, an older one never again, remembered by the replica that comes after."""

from pathlib import Path

import pytest

from protos import common_pb2
from quartet.serving.runs.lease import LONGEST_S, MOST_AHEAD, Fence
from quartet.wire.errors import FailedPrecondition, InvalidArgument, LeaseLost, Unavailable
from tests.unit.fake_clock import Clock


def lease(run_id: str, number: int, identity: str = "") -> common_pb2.Lease:
    return common_pb2.Lease(run_id=run_id, number=number, identity=identity)


def claim(
    fence: Fence, run_id: str, number: int, ttl_s: float = 30, take_over: bool = False, identity: str = ""
) -> bool:
    return fence.claim(lease(run_id, number, identity), common_pb2.Claim(ttl_s=ttl_s, take_over=take_over))


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def fence(clock: Clock) -> Fence:
    return Fence(clock=clock)


def test_before_a_claim_no_call_passes(fence: Fence) -> None:
    with pytest.raises(FailedPrecondition, match=r"run a \(lease 1\) has not claimed this replica yet"):
        fence.check(lease("a", 1))
    with pytest.raises(InvalidArgument, match="lease: required"):
        fence.check(common_pb2.Lease())
    assert fence.held() == common_pb2.Held(lease=common_pb2.Lease())


def test_a_live_run_keeps_its_services_and_a_dead_one_does_not(fence: Fence, clock: Clock) -> None:
    assert claim(fence, "a", 1)
    assert fence.held().left_s == 30
    with pytest.raises(LeaseLost, match=r"run a holds this service and is alive; .* take over from it as run b"):
        claim(fence, "b", 2)
    clock.now += 29
    assert not claim(fence, "a", 1)  # renewed
    clock.now += 29
    with pytest.raises(LeaseLost):
        claim(fence, "b", 2)
    fence.check(lease("a", 1))
    clock.now += 1
    # Nothing is taken from a run for being slow: only another's claim does.
    fence.check(lease("a", 1))
    assert claim(fence, "b", 2)
    fence.check(lease("b", 2))


def test_an_older_run_is_refused_for_good_and_both_are_named(fence: Fence, clock: Clock) -> None:
    claim(fence, "a", 1)
    claim(fence, "b", 2, take_over=True)
    claim(fence, "b", 2, ttl_s=0)  # given back
    both = r"lease: run a \(lease 1\) no longer holds this service: run b \(lease 2\) does; nothing was changed"
    with pytest.raises(LeaseLost, match=both):
        fence.check(lease("a", 1))
    for number in (1, 2):
        with pytest.raises(LeaseLost, match=r"run b \(lease 2\) does"):
            claim(fence, "a", number, take_over=True)
    assert claim(fence, "a", 3)


def test_a_replica_that_missed_a_claim_does_not_say_that_the_older_run_holds_the_service(fence: Fence) -> None:
    """The replica was silent then. The run that holds the others has only to claim it too."""
    claim(fence, "a", 1)
    with pytest.raises(FailedPrecondition, match=r"run b \(lease 2\) has not claimed this replica yet") as caught:
        fence.check(lease("b", 2))
    assert not isinstance(caught.value, LeaseLost)
    assert claim(fence, "b", 2, take_over=True)
    fence.check(lease("b", 2))


def test_the_same_run_resumed_need_not_wait_for_its_crashed_self_and_fences_it(fence: Fence) -> None:
    claim(fence, "a", 1)
    assert claim(fence, "a", 2)
    with pytest.raises(LeaseLost, match=r"run a \(lease 1\) no longer holds this service: run a \(lease 2\) does"):
        fence.check(lease("a", 1))


def test_another_caller_that_repeats_run_and_number_has_no_lease(fence: Fence, tmp_path: Path) -> None:
    claim(fence, "a", 3, identity="alice")
    fence.check(lease("a", 3, "alice"))
    both = r"lease: run a of bob \(lease 3\) does not hold this service: run a of alice \(lease 3\) does"
    with pytest.raises(LeaseLost, match=both):
        fence.check(lease("a", 3, "bob"))
    # Neither as a renewal, not even one that takes over, nor as the same run resumed.
    for take_over in (False, True):
        with pytest.raises(LeaseLost, match=both):
            claim(fence, "a", 3, identity="bob", take_over=take_over)
    with pytest.raises(
        LeaseLost, match=r"run a of alice holds .* and is alive; .* take over from it as run a of bob"
    ):
        claim(fence, "a", 4, identity="bob")
    fence.check(lease("a", 3, "alice"))
    assert claim(fence, "a", 4, identity="alice")


def test_a_replica_that_takes_anothers_place_knows_whose_lease_it_was(tmp_path: Path) -> None:
    claim(Fence(tmp_path / "lease.json"), "a", 3, identity="alice")
    after = Fence(tmp_path / "lease.json")
    after.check(lease("a", 3, "alice"))
    with pytest.raises(LeaseLost):
        after.check(lease("a", 3, "bob"))


@pytest.mark.parametrize("ttl_s", [-1, LONGEST_S + 1, float("nan"), float("inf")])
def test_no_run_is_alive_for_ever(fence: Fence, ttl_s: float) -> None:
    with pytest.raises(InvalidArgument, match=r"claim.ttl_s: .*; must be 0 to 600"):
        claim(fence, "a", 1, ttl_s)


@pytest.mark.parametrize(("run_id", "number"), [("", 1), ("a", 0), ("a", -1), ("a" * 201, 1), ("\x1b[2J", 1)])
def test_a_lease_that_cannot_be_is_refused(fence: Fence, run_id: str, number: int) -> None:
    with pytest.raises(InvalidArgument, match="lease: needs a run_id"):
        claim(fence, run_id, number)


def test_no_claim_uses_up_the_numbers_of_later_ones(fence: Fence) -> None:
    claim(fence, "a", 3)
    for number in (2**63 - 1, 3 + MOST_AHEAD + 1):
        with pytest.raises(InvalidArgument, match=r"lease.number: \d+; must be at most 4294967296 above 3"):
            claim(fence, "a", number)
    claim(fence, "a", 3 + MOST_AHEAD)


def test_a_replica_that_takes_anothers_place_lets_no_older_run_through(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "runs" / "lease.json"
    before = Fence(file, clock)
    claim(before, "a", 1)
    claim(before, "b", 2, ttl_s=20, take_over=True)
    clock.now += 15
    after = Fence(file, clock)
    assert after.held() == common_pb2.Held(lease=lease("b", 2), left_s=20)
    after.check(lease("b", 2))
    with pytest.raises(LeaseLost, match=r"run a \(lease 1\) no longer"):
        after.check(lease("a", 1))
    claim(after, "b", 2, ttl_s=0)
    assert Fence(file, clock).held().left_s == 0


def test_a_lease_that_cannot_be_read_or_kept_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text("{")
    with pytest.raises(RuntimeError, match="should hold a lease but does not"):
        Fence(tmp_path / "lease.json")
    (tmp_path / "file").touch()
    fence = Fence(tmp_path / "no" / "lease.json")
    (tmp_path / "no").touch()
    with pytest.raises(Unavailable, match="this service cannot write its lease down: "):
        claim(fence, "a", 1)
