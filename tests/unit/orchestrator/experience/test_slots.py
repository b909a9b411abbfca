"""Admission and choice of samples: cases by hand, and random schedules."""

import random

import pytest

from orchestrator.experience.slots import Slots, in_time


def admitted(slots: Slots, first: int) -> list[int]:
    """Fills the free slots with the groups from `first` on."""
    groups = list(range(first, first + slots.free()))
    for group in groups:
        slots.admit(group)
    return groups


def finished(slots: Slots, *groups: int) -> list[int] | None:
    for group in groups:
        slots.finish(group)
    return slots.choose()


def test_the_example_of_the_documentation() -> None:
    slots = Slots(2, staleness=1, depth=1, version=4, last=9)
    slots.wait()
    assert admitted(slots, 0) == [0, 1, 2, 3]
    assert finished(slots, 3) is None
    assert finished(slots, 1) == [1, 3]
    slots.take([1, 3])
    assert (slots.next_take, slots.free()) == (5, 0)
    slots.wait()
    assert slots.free() == 0
    slots.commit(5)
    assert admitted(slots, 4) == [4, 5]
    assert finished(slots, 4, 5) is None
    assert finished(slots, 0) is None
    assert finished(slots, 2) == [0, 2]


def test_lock_step_admits_a_batch_when_the_loop_waits_and_its_version_is_served() -> None:
    slots = Slots(3, staleness=0, depth=0, version=7, last=9)
    assert slots.free() == 0  # an evaluation may go on
    slots.wait()
    assert admitted(slots, 0) == [0, 1, 2]
    assert finished(slots, 2, 0) is None
    assert finished(slots, 1) == [0, 1, 2]
    slots.take([0, 1, 2])
    assert slots.free() == 0
    slots.wait()
    assert slots.free() == 0
    slots.commit(8)
    assert slots.free() == 3


def test_depth_limits_what_is_under_way_and_leaves_room_to_pass_a_slow_sample_by() -> None:
    slots = Slots(2, staleness=3, depth=1, version=0, last=9)
    slots.wait()
    assert admitted(slots, 0) == [0, 1, 2, 3]  # a batch, and one ahead of it
    assert finished(slots, 1, 3) == [1, 3]
    slots.take([1, 3])
    assert slots.free() == 0  # 0 and 2 are ahead of the batch that trains
    slots.wait()
    assert admitted(slots, 4) == [4, 5]
    # 0 and 2 have until version 3, so that 4 and 5 may pass them by once, and twice, but not three times.
    for version, groups in ((1, [4, 5]), (2, [6, 7])):
        assert slots.next_take == version
        assert finished(slots, *groups) == groups
        slots.take(groups)
        slots.wait()
        admitted(slots, groups[-1] + 1)
    assert finished(slots, 8, 9) is None
    assert finished(slots, 0, 2) == [0, 2]


def test_a_later_deadline_does_not_take_the_place_that_an_earlier_one_needs() -> None:
    slots = Slots(2, staleness=2, depth=2, version=0, last=9)
    slots.wait()
    assert admitted(slots, 0) == [0, 1, 2, 3, 4, 5]  # deadline 2
    assert finished(slots, 4, 5) == [4, 5]
    slots.take([4, 5])
    slots.commit(1)
    slots.wait()
    assert admitted(slots, 6) == [6, 7]  # deadline 3
    # Version 1 may not take 6 and 7: four of deadline 2 would be left, and version 2 takes two.
    assert finished(slots, 6, 7) is None
    assert finished(slots, 0) is None  # nor 0 and 6, for the same reason
    assert finished(slots, 3) == [0, 3]


def test_nothing_is_admitted_beyond_the_last_batch() -> None:
    slots = Slots(2, staleness=4, depth=4, version=5, last=6)
    slots.wait()
    assert admitted(slots, 0) == [0, 1, 2, 3]


def test_batches_of_the_journal_hold_their_slots() -> None:
    slots = Slots(2, staleness=1, depth=1, version=3, last=9, kept=2)
    slots.wait()
    assert slots.free() == 0  # versions 3 and 4 train on what is kept
    slots.take_kept()
    assert slots.free() == 0  # version 3 is served: it may sample for version 4 only
    slots.commit(4)
    slots.wait()
    assert admitted(slots, 4) == [4, 5]  # for version 5
    slots.take_kept()
    assert (slots.next_take, slots.free()) == (5, 0)
    assert finished(slots, 4, 5) == [4, 5]


@pytest.mark.parametrize(
    ("deadlines", "met"),
    [
        ([], True),
        ([6] * 5, False),
        ([5, 5], True),
        ([5, 5, 5], False),
        ([6, 5, 5, 6], True),
        ([7, 6, 6, 6, 6], True),
        ([4], False),
    ],
)
def test_deadlines_are_met_two_a_version_from_5_on(deadlines: list[int], met: bool) -> None:
    assert in_time(deadlines, 2, 5) is met


def test_a_discarded_group_leaves_its_room_to_another() -> None:
    slots = Slots(2, staleness=0, depth=0, version=7, last=9)
    slots.wait()
    assert admitted(slots, 0) == [0, 1]
    assert finished(slots, 1) is None
    slots.discard(1)
    assert slots.free() == 1
    assert admitted(slots, 2) == [2]
    assert finished(slots, 0) is None  # a batch never takes what was discarded
    assert finished(slots, 2) == [0, 2]
    slots.take([0, 2])
    with pytest.raises(KeyError):
        slots.discard(2)  # what was taken stays taken


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_breaks_the_bound_or_ends_without_a_batch(seed: int) -> None:
    """Fifty batches in which finishing, committing and taking come in random order, as fast or slow as they like,
    while a share of all finished groups, up to nine in ten, is discarded."""
    draw = random.Random(seed)
    staleness = draw.randint(0, 4)
    size, depth = draw.randint(1, 5), draw.randint(min(1, staleness), staleness)
    share, kept = draw.choice([0, 0.1, 0.5, 0.9]), draw.choice([0, 0, 2])
    slots = Slots(size, staleness=staleness, depth=depth, version=0, last=49, kept=kept)
    born: dict[int, int] = {}
    wanted = (50 - kept) * size
    pending: list[int] = []
    discarded: list[int] = []
    taken: list[int] = []
    while slots.next_take < 50:
        slots.wait()
        for group in admitted(slots, len(born)):
            born[group] = slots.served
            pending.append(group)
        can_finish, can_commit = bool(pending), slots.served < slots.next_take
        if can_finish and (not can_commit or draw.random() < 0.7):
            slots.finish(group := pending.pop(draw.randrange(len(pending))))
            if draw.random() < share:
                slots.discard(group)
                discarded.append(group)
        elif can_commit:
            # The loop awaits a delivery before it stages the next: all but the last version are served.
            slots.commit(slots.next_take)
        else:
            assert kept or slots.choose(), "neither a sample nor a push is awaited, and there is no batch"
        if slots.next_take - slots.served > min(1, staleness):
            continue
        if kept:
            kept -= 1
            slots.take_kept()
        elif chosen := slots.choose():
            assert all(slots.next_take - born[group] <= staleness for group in chosen)
            slots.take(chosen)
            taken += chosen
    assert sorted(taken + discarded) == sorted(born.keys() - pending)
    assert len(set(taken)) == len(taken) == wanted
    assert not set(taken) & set(discarded)
