"""Trajectories of several segments, and what becomes of them as columns."""

import numpy as np
import pytest

from quartet.trajectory import Segment, Trajectory, columns_of


def given(*ids: int) -> Segment:
    return Segment(np.asarray(ids, np.int32))


def sampled(*ids: int, logprob: float = -0.5, version: int = 7) -> Segment:
    return Segment(np.asarray(ids, np.int32), np.full(len(ids), logprob, np.float32), ((version, 0, len(ids)),))


def test_three_segments_and_one_of_two_turns() -> None:
    """The answer of an environment is part of the trajectory, and is not trained on."""
    two_turns = (given(1, 2), sampled(3, 4), given(5), sampled(6, logprob=-1.0, version=8))
    columns = columns_of([Trajectory(17, 16, 3, two_turns), Trajectory(18, 18, 4, (given(9), sampled(9), given(9)))])
    assert columns.ids.tolist() == [1, 2, 3, 4, 5, 6, 9, 9, 9]
    assert columns.lengths.tolist() == [6, 3]
    assert columns.counts.tolist() == [3, 1]
    assert columns["logprobs"].tolist() == [-0.5, -0.5, -1.0, -0.5]
    assert columns["versions"].tolist() == [7, 7, 8, 7]
    assert [columns[name].tolist() for name in ("number", "group", "row")] == [[17, 18], [16, 18], [3, 4]]
    assert [prompt.tolist() for prompt in columns.prompts] == [[1, 2], [9]]
    assert [response.tolist() for response in columns.responses] == [[3, 4, 5, 6], [9, 9]]
    assert columns.response_mask.tolist() == [True, True, False, True, True, False]
    assert not columns.single_turn


def test_versions_change_within_a_segment() -> None:
    ids, logprobs = np.asarray([5, 6, 7], np.int32), np.zeros(3, np.float32)
    one = Trajectory(5, 4, 0, (given(1), Segment(ids, logprobs, ((6, 0, 1), (7, 1, 3)))))
    assert columns_of([one])["versions"].tolist() == [6, 7, 7]
    assert one.member == 1


def test_no_trajectories_and_one_of_which_nothing_was_sampled() -> None:
    assert len(columns_of([])) == 0
    columns = columns_of([Trajectory(0, 0, 0, (given(1, 2),))])
    assert (columns.counts.tolist(), columns["logprobs"].tolist()) == ([0], [])


def test_a_trajectory_begins_with_what_was_given() -> None:
    with pytest.raises(ValueError, match="sampled: trajectory 0 begins with a sampled token"):
        columns_of([Trajectory(0, 0, 0, (sampled(1), given(2)))])


def test_a_log_prob_for_each_sampled_token() -> None:
    short = Segment(np.asarray([5, 6], np.int32), np.zeros(1, np.float32), ((7, 0, 2),))
    with pytest.raises(ValueError, match=r"^logprobs: 1 values for 2"):
        columns_of([Trajectory(0, 0, 0, (given(1), short))])
