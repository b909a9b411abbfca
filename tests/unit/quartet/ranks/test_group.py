"""The failure of one rank ends the call, and the group too where it cannot go on."""

import asyncio
import threading
from typing import Any

import pytest

from quartet.ranks.group import LOOK_S, STOPPED_LOOKS, RankDied, RankGroup, RanksLost
from quartet.wire.errors import DeadlineExceeded, Internal, InvalidArgument, ResourceExhausted
from tests.unit.fake_ranks import NEVER, FakeRank
from tests.unit.virtual_time import in_virtual_time


class Trainer:
    """The methods that are called here; what they answer is the ranks' to say."""

    def train(self, batch: int = 0, seed: int = 0) -> str:
        raise NotImplementedError

    def logprobs(self) -> str:
        raise NotImplementedError

    def values(self) -> str:
        raise NotImplementedError

    def save(self) -> str:
        raise NotImplementedError

    def send(self) -> str:
        raise NotImplementedError

    def add(self, membership: int) -> str:
        raise NotImplementedError


def group(*ranks: FakeRank) -> RankGroup:
    return RankGroup("policy", ranks, grace_s=0.05)


@in_virtual_time
async def test_a_call_goes_to_all_ranks_and_rank_0_answers() -> None:
    ranks = [FakeRank("a"), FakeRank("b"), FakeRank("c")]
    assert await group(*ranks).call(Trainer.train, 1, 1, seed=2) == "a"
    assert [rank.called for rank in ranks] == [[("run", "Trainer.train", 1, 2)]] * 3


async def test_a_large_value_is_stored_once_while_the_loop_goes_on() -> None:
    ranks, goes_on = [FakeRank("a", "b"), FakeRank("c", "d")], threading.Event()
    stored: list[int] = []

    def store(value: int) -> tuple[str, int]:
        assert goes_on.wait(60)
        stored.append(value)
        return "stored", value

    ours = RankGroup("policy", ranks, store=store)
    asked = asyncio.ensure_future(ours.call(Trainer.train, 60, ours.share(7), 2))
    await asyncio.sleep(0)  # which a store on this loop would hold up for good
    goes_on.set()
    assert await asked == "a"
    assert [rank.called for rank in ranks] == [[("run", "Trainer.train", ("stored", 7), 2)]] * 2
    assert stored == [7]


async def test_a_value_that_is_not_stored_in_time_ends_the_group() -> None:
    rank, never = FakeRank("a"), threading.Event()
    ours = RankGroup("policy", [rank], store=lambda value: never.wait(60))
    with pytest.raises(RanksLost, match=r"policy.train: its argument was not stored within 0.05 s"):
        await ours.call(Trainer.train, 0.05, ours.share(7))
    never.set()
    assert (rank.called, rank.killed) == ([], 1)

    def fails(value: int) -> None:
        raise MemoryError("the store is full")

    with pytest.raises(MemoryError, match="the store is full"):
        await (full := RankGroup("policy", [FakeRank("a")], store=fails)).call(Trainer.train, 60, full.share(7))


@in_virtual_time
async def test_a_call_beside_goes_to_the_first_ranks_and_gives_all_answers() -> None:
    ranks = [FakeRank("d"), FakeRank("e"), FakeRank("c")]
    assert await group(*ranks).beside(2, Trainer.add, 1, 1) == ["d", "e"]
    assert [rank.called for rank in ranks] == [[("run_beside", "Trainer.add", 1)]] * 2 + [[]]


def build(*arguments: Any) -> None:
    """A trainer, as far as a group knows."""


@in_virtual_time
async def test_ranks_start_where_rank_0_opened_the_store() -> None:
    ranks = [FakeRank(("host", 7)), FakeRank()]
    await group(*ranks).start(build, "x", timeout_s=1)
    assert ranks[0].called == [("open",), ("start", ("host", 7), build, "x")]
    assert ranks[1].called == [("start", ("host", 7), build, "x")]


@in_virtual_time
async def test_a_rank_that_died_between_two_calls_ends_the_group() -> None:
    calls: Any = (RankGroup.check, lambda ours: ours.call(Trainer.train, NEVER))
    for asked in calls:
        ranks = [FakeRank(), FakeRank()]
        ours = group(*ranks)
        ours.check()
        ranks[1].death = "killed by signal 9"
        with pytest.raises(RanksLost, match=r"^policy: rank 1 of 2 died: killed by signal 9$"):
            await asked(ours)
        assert ([rank.called for rank in ranks], [rank.killed for rank in ranks]) == ([[], []], [1, 1])


@in_virtual_time
async def test_a_rank_whose_process_stands_still_ends_the_group() -> None:
    ranks = [FakeRank(after_s=NEVER), FakeRank()]
    ours = group(*ranks)
    ranks[0].stopped = True
    lost = r"^policy.train: rank 0 of 2 died: a signal has stopped its process$"
    with pytest.raises(RanksLost, match=lost):
        await ours.call(Trainer.train, NEVER)
    assert asyncio.get_running_loop().time() == pytest.approx(STOPPED_LOOKS * LOOK_S)
    assert [rank.killed for rank in ranks] == [1, 1]
    with pytest.raises(RanksLost, match=lost):
        ours.check()


@in_virtual_time
async def test_a_rank_that_was_stopped_for_a_moment_goes_on() -> None:
    """Only looks in a row count."""
    rank, loop = FakeRank("trained", after_s=100), asyncio.get_running_loop()
    for moment in range(9):
        began = 10 * moment + LOOK_S / 2
        loop.call_later(began, setattr, rank, "stopped", True)
        loop.call_later(began + (STOPPED_LOOKS - 1) * LOOK_S, setattr, rank, "stopped", False)
    assert await group(rank).call(Trainer.train, NEVER) == "trained"


@in_virtual_time
async def test_the_death_of_a_rank_is_named_at_once_and_ends_the_group() -> None:
    ranks = [FakeRank(after_s=NEVER), FakeRank(RankDied("killed by signal 9"))]
    ours = group(*ranks)
    began = asyncio.get_running_loop().time()
    with pytest.raises(RanksLost, match=r"policy.train: rank 1 of 2 died: killed by signal 9"):
        await ours.call(Trainer.train, NEVER)
    assert [rank.killed for rank in ranks] == [1, 1]
    with pytest.raises(RanksLost, match="rank 1 of 2 died"):
        await ours.call(Trainer.logprobs, NEVER)
    with pytest.raises(RanksLost, match="rank 1 of 2 died"):
        ours.check()
    assert asyncio.get_running_loop().time() == began
    assert [len(rank.called) for rank in ranks] == [1, 1]


@in_virtual_time
async def test_a_death_is_named_also_when_its_peer_fails_first() -> None:
    ranks = [FakeRank(RuntimeError("Connection closed by peer")), FakeRank(RankDied("gone"), after_s=0.02)]
    with pytest.raises(RanksLost, match="rank 1 of 2 died: gone"):
        await group(*ranks).call(Trainer.train, NEVER)


@in_virtual_time
async def test_a_rank_that_does_not_finish_after_anothers_error_ends_the_group() -> None:
    ranks = [FakeRank(after_s=NEVER), FakeRank(KeyError("x")), FakeRank(after_s=NEVER)]
    with pytest.raises(RanksLost, match=r"rank 1 of 3: KeyError: 'x'; ranks 0, 2 did not finish after it"):
        await group(*ranks).call(Trainer.train, NEVER)
    assert [rank.killed for rank in ranks] == [1, 1, 1]


@in_virtual_time
async def test_an_error_after_which_all_have_finished_ends_only_the_call() -> None:
    ours = group(FakeRank(InvalidArgument("path: no"), KeyError("x"), "fine"), FakeRank(after_s=0.01))
    with pytest.raises(InvalidArgument, match="path: no"):
        await ours.call(Trainer.save, 1)
    with pytest.raises(Internal, match=r"policy.train: rank 0 of 2: KeyError: 'x'"):
        await ours.call(Trainer.train, 1)
    assert await ours.call(Trainer.train, 1) == "fine"


@in_virtual_time
async def test_a_deadline_names_the_silent_rank_and_ends_the_group() -> None:
    ours = group(FakeRank(), FakeRank(after_s=NEVER))
    with pytest.raises(RanksLost, match=r"policy.train: no answer within 0.05 s from rank 1 of 2"):
        await ours.call(Trainer.train, 0.05)
    with pytest.raises(RanksLost):
        ours.check()


@in_virtual_time
async def test_a_deadline_beside_a_call_in_which_the_group_ended_is_its_end() -> None:
    slow = FakeRank(after_s=NEVER)
    ours = group(slow)
    beside = asyncio.ensure_future(ours.beside(1, Trainer.send, 0.1))
    with pytest.raises(RanksLost, match=r"policy.train"):
        await ours.call(Trainer.train, 0.02)
    with pytest.raises(RanksLost, match=r"policy.send"):
        await beside


@in_virtual_time
async def test_a_call_whose_group_is_stopped_beside_it_does_not_wait_for_its_answer() -> None:
    ranks = [FakeRank(after_s=NEVER), FakeRank()]
    ours = group(*ranks)
    call = asyncio.ensure_future(ours.call(Trainer.train, 60))
    await asyncio.sleep(1)
    ours.stop()
    assert [rank.killed for rank in ranks] == [1, 1]
    with pytest.raises(RanksLost, match="policy: stopped"):
        await call
    assert asyncio.get_running_loop().time() <= 1 + 2 * LOOK_S


@in_virtual_time
async def test_a_deadline_of_ranks_that_meet_no_other_ends_nothing() -> None:
    slow = FakeRank(after_s=NEVER)
    ours = group(slow, FakeRank())
    with pytest.raises(DeadlineExceeded, match=r"policy.send: no answer within 0.05 s from rank 0 of 2"):
        await ours.beside(1, Trainer.send, 0.05)
    slow.after_s = 0
    await ours.call(Trainer.train, 1)


@in_virtual_time
async def test_calls_take_turns_and_a_deadline_counts_from_the_turn() -> None:
    ours = group(FakeRank("first", "second", after_s=0.15))
    assert await asyncio.gather(*(ours.call(Trainer.values, 0.25) for _ in range(2))) == ["first", "second"]
    assert asyncio.get_running_loop().time() == pytest.approx(2 * 0.15)


@in_virtual_time
async def test_a_rank_that_finds_no_place_is_named() -> None:
    ranks = [FakeRank(("host", 7)), FakeRank(after_s=NEVER)]
    with pytest.raises(ResourceExhausted, match=r"policy.start: .* from rank 1 of 2; does the cluster have the CPUs"):
        await group(*ranks).start(build, timeout_s=0.05)
    assert [rank.killed for rank in ranks] == [1, 1]


@in_virtual_time
async def test_a_group_that_does_not_start_has_ended() -> None:
    ranks = [FakeRank(("host", 7)), FakeRank(MemoryError("model too large"))]
    with pytest.raises(Internal, match=r"policy.start: rank 1 of 2: MemoryError: model too large"):
        await group(*ranks).start(build, timeout_s=1)
    assert [rank.killed for rank in ranks] == [1, 1]
