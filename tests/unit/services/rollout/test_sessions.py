"""Sessions: which tokens go on which, which carry loss, and their bounds."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from quartet.trajectory import LARGEST_REWARD, Segment, columns_of
from quartet.wire.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from services.rollout import sessions as module
from services.rollout.session_terms import KEPT_S, Terms
from services.rollout.session_trajectory import as_json, columns_of_session, trajectories_of
from services.rollout.sessions import MOST_TURNS, NOTHING, Sessions
from tests.unit.fake_clock import Clock
from tests.unit.rows import ids

ME, S = "me", "session-1"


def sampled(*tokens: int, version: int = 7) -> Segment:
    return Segment(ids(*tokens), -np.arange(1, len(tokens) + 1, dtype=np.float32), ((version, 0, len(tokens)),))


@pytest.fixture
def sessions() -> Sessions:
    made = Sessions()
    made.start(ME, S, "t", "task")
    return made


def record(sessions: Sessions, prompt: Any, response: Segment, digest: bytes = b"", name: str = "c1") -> Any:
    return sessions.record(ME, S, name, prompt, response, digest)


def told_of(sessions: Sessions, name: str = S) -> Any:
    return json.loads(as_json(sessions.trajectory(ME, name)))


def test_a_request_that_begins_with_all_tokens_goes_on_and_what_it_adds_is_given(sessions: Sessions) -> None:
    assert record(sessions, ids(5, 6), sampled(10, 11)) == (0, 0)
    assert record(sessions, ids(5, 6, 10, 11, 7), sampled(12, version=8)) == (0, 0)
    told = told_of(sessions)
    [sequence] = told["sequences"]
    assert sequence["ids"] == [5, 6, 10, 11, 7, 12]
    assert sequence["segments"] == [
        {"length": 2, "sampled": False},
        {"length": 2, "sampled": True, "logprobs": [-1, -2], "version_spans": [{"version": 7, "start": 0, "end": 2}]},
        {"length": 1, "sampled": False},
        {"length": 1, "sampled": True, "logprobs": [-1], "version_spans": [{"version": 8, "start": 0, "end": 1}]},
    ]
    assert [each["end"] for each in told["interactions"]] == [4, 6]


@pytest.mark.parametrize("prompt", [ids(5, 6, 10), ids(5, 6, 10, 12), ids(9, 9, 9, 9, 9), ids(5, 6)])
def test_another_prompt_is_a_fork_in_which_all_of_it_is_given(sessions: Sessions, prompt: Any) -> None:
    record(sessions, ids(5, 6), sampled(10, 11))
    assert record(sessions, prompt, sampled(20)) == (1, 1)
    told = told_of(sessions)
    assert (told["forks"], sessions.counts()["session_forks_total"]) == (1, 1)
    assert [segment["sampled"] for segment in told["sequences"][1]["segments"]] == [False, True]
    # Both go on, each with its own.
    assert record(sessions, ids(5, 6, 10, 11, 1), sampled(21)) == (0, 1)
    assert record(sessions, np.concatenate([prompt, ids(20, 2)]), sampled(22)) == (1, 1)


def test_of_two_sequences_that_begin_alike_the_longer_goes_on(sessions: Sessions) -> None:
    record(sessions, ids(5), sampled(10))
    record(sessions, ids(5, 10, 6), sampled(11))
    record(sessions, ids(5), sampled(10, 6, 11, 12))
    assert record(sessions, ids(5, 10, 6, 11, 12, 7), sampled(13)) == (1, 1)


def test_messages_find_the_tokens_that_they_stand_for(sessions: Sessions) -> None:
    assert sessions.begun(ME, S, [b"a"], "t") == (NOTHING, Terms(), 0)
    record(sessions, ids(5), sampled(10), b"ab")
    record(sessions, ids(5, 10, 6), sampled(11), b"abcd")
    for digests, tokens, messages in (
        ([b"a", b"ab", b"abx"], [5, 10], 2),
        ([b"a", b"ab", b"abc", b"abcd", b"abcde"], [5, 10, 6, 11], 4),
        ([b"x"], [], 0),
        ([], [], 0),
    ):
        begun = sessions.begun(ME, S, digests, "t").begun
        assert (begun.ids.tolist(), begun.messages) == (tokens, messages)


def test_a_request_without_a_response_leaves_its_number_to_the_next(sessions: Sessions) -> None:
    assert [sessions.begun(ME, S, [], "t").turn for _ in range(3)] == [0, 1, 2]
    sessions.leave(ME, S, 1, full=False)
    assert [sessions.begun(ME, S, [], "t").turn for _ in range(2)] == [1, 3]
    assert not told_of(sessions)["full"]
    for turn, full in ((0, True), (1, False)):
        sessions.leave(ME, S, turn, full)
    assert told_of(sessions)["full"]


def test_a_session_is_a_trajectory_of_the_contract(sessions: Sessions) -> None:
    record(sessions, ids(5, 6), sampled(10, 11))
    record(sessions, ids(5, 6, 10, 11, 7), sampled(12, version=8))
    record(sessions, ids(9), sampled(13))
    sessions.set_reward(ME, S, 0.5, "")
    told = told_of(sessions)
    assert (told["reward"], told["task_id"]) == (0.5, "task")
    first, second = trajectories_of(told, 40, 40, 3)
    assert (first.number, second.number, second.group, second.row) == (40, 41, 40, 3)
    columns = columns_of([first, second])
    assert columns.ids.tolist() == [5, 6, 10, 11, 7, 12, 9, 13]
    assert columns.sampled.tolist() == [False, False, True, True, False, True, False, True]
    assert columns_of_session(told, 40, 40, 3)["score"].tolist() == [0.5, 0.5]
    told["interactions"][1]["reward"], told["reward"] = 2.0, None
    assert columns_of_session(told, 40, 40, 3)["score"].tolist() == pytest.approx([2.0, np.nan], nan_ok=True)
    missing = told["sequences"][0]["segments"][1]["logprobs"].pop()
    with pytest.raises(ValueError, match="a segment of 2 ids has 1 log-probs"):
        trajectories_of(told, 0, 0, 0)
    told["sequences"][0]["segments"][1]["logprobs"].append(missing)
    told["sequences"][0]["ids"].pop()
    with pytest.raises(ValueError, match=r"sequences\[0\]: 5 ids, but segments of 6"):
        trajectories_of(told, 0, 0, 0)


def test_a_response_that_was_lost_on_its_way_is_not_trained_on(sessions: Sessions) -> None:
    """The request came again, and the conversation went on from the second response."""
    record(sessions, ids(5), sampled(10), name="c1")
    again = ids(5, 10, 6)
    for name, token in (("c2", 11), ("c3", 12)):
        record(sessions, again, sampled(token), name=name)
    told = told_of(sessions)
    assert [each["superseded"] for each in told["interactions"]] == [False, True, False]
    assert [each["ids"] for each in told["sequences"]] == [[], [5, 10, 6, 12]]
    assert [each["sampled"] for each in told["sequences"][1]["segments"]] == [False, True, False, True]
    assert [(each["sequence"], each["end"]) for each in told["interactions"]] == [(1, 2), (1, 4), (1, 4)]
    record(sessions, ids(5, 10, 6, 11, 7), sampled(13), name="c4")  # it had arrived
    told = told_of(sessions)
    assert [each["superseded"] for each in told["interactions"]] == [False, False, True, False]
    assert [each["ids"] for each in told["sequences"]] == [[5, 10, 6, 11, 7, 13], []]
    assert [len(each.segments) for each in trajectories_of(told, 4, 4, 0)] == [6]
    sessions.set_reward(ME, S, 1.0, "c3")
    told = told_of(sessions)
    assert not any(each["superseded"] for each in told["interactions"])
    assert [each.number for each in trajectories_of(told, 4, 4, 0)] == [4, 5]


def test_responses_are_lost_again_and_again_and_it_stays_one_conversation(sessions: Sessions) -> None:
    """Sampled tokens carry loss once each, and those that were lost none."""
    record(sessions, ids(5), sampled(10))
    record(sessions, ids(5, 10, 6), sampled(20))
    record(sessions, ids(5, 10, 6), sampled(11))  # begins anew, with all of its prompt given
    record(sessions, ids(5, 10, 6, 11), sampled(21))  # nothing is given between the two
    record(sessions, ids(5, 10, 6, 11), sampled(12))
    told = told_of(sessions)
    [left] = trajectories_of(told, 0, 0, 0)
    assert [(each.ids.tolist(), each.sampled) for each in left.segments] == [
        *(([5], False), ([10], True), ([6], False), ([11], True), ([12], True)),
    ]
    assert [each["superseded"] for each in told["interactions"]] == [False, True, False, True, False]
    assert {each["sequence"] for each in told["interactions"]} == {2}


def test_a_repeated_request_that_may_go_on_from_two_sequences_goes_on_from_the_longer(sessions: Sessions) -> None:
    record(sessions, ids(5), sampled(10))
    record(sessions, ids(5, 10, 6), sampled(11))
    record(sessions, ids(5), sampled(10))  # the same token again
    record(sessions, ids(5, 10, 6, 11, 7), sampled(20))
    record(sessions, ids(5, 10, 6, 11, 7), sampled(21))  # goes on from the shorter
    record(sessions, ids(5, 10, 6, 11, 7), sampled(12))
    first, second = trajectories_of(told_of(sessions), 0, 0, 0)
    assert [(each.ids.tolist(), each.sampled) for each in first.segments] == [([5], False), ([10], True)]
    assert [(each.ids.tolist(), each.sampled) for each in second.segments] == [
        *(([5], False), ([10], True), ([6], False), ([11], True), ([7], False), ([12], True)),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_token_that_arrived_carries_loss_once_where_it_was_sampled(sessions: Sessions, seed: int) -> None:
    """Requests that go on from any response, are repeated, or begin another conversation, in any order."""
    draw = np.random.default_rng(seed)
    turns: list[Any] = []
    for number in range(30):
        prompt = ids(*draw.integers(0, 3, draw.integers(1, 4)))
        if turns and draw.random() < 0.8:
            before, response = turns[draw.integers(max(0, len(turns) - 4), len(turns))]
            after = draw.integers(0, 3, draw.integers(0, 3)).astype(np.int32)
            prompt = before if draw.random() < 0.4 else np.concatenate([before, response.ids, after])
        response = sampled(*draw.integers(0, 3, draw.integers(1, 4)).tolist(), version=number)
        record(sessions, prompt, response, name=f"c{number}")
        turns.append((prompt, response))
    told = told_of(sessions)
    arrived = [turn for turn in told["interactions"] if not turn["superseded"]]
    assert 1 < len(arrived) < 30
    for turn in arrived:
        prompt, response = turns[int(turn["id"][1:])]
        sequence = told["sequences"][turn["sequence"]]
        assert sequence["ids"][: turn["end"]] == [*prompt.tolist(), *response.ids.tolist()]
        ends = np.cumsum([segment["length"] for segment in sequence["segments"]]).tolist()
        segment = sequence["segments"][ends.index(turn["end"])]
        assert segment["version_spans"][0]["version"] == int(turn["id"][1:])
        assert (segment["length"], segment["logprobs"]) == (len(response.ids), response.logprobs.tolist())
    every = [segment for sequence in told["sequences"] for segment in sequence["segments"] if segment["sampled"]]
    assert len(every) == len(arrived)
    assert len(columns_of_session(told, 0, 0, 0)) == sum(bool(each["segments"]) for each in told["sequences"])


def test_the_first_of_a_conversation_may_be_lost_too(sessions: Sessions) -> None:
    for token in (10, 11, 12):
        record(sessions, ids(5), sampled(token), name=f"c{token}")
    [left] = trajectories_of(told_of(sessions), 0, 0, 0)
    assert [segment.ids.tolist() for segment in left.segments] == [[5], [12]]


def test_the_bytes_that_are_counted_are_all_that_are_held(sessions: Sessions) -> None:
    """Each request brings the whole history, which the session has already."""
    tracemalloc.start()
    try:
        history = ids(*range(20_000))
        before = tracemalloc.get_traced_memory()[0]
        for turn in range(40):
            # As they come from another process: arrays that cannot be written, parts of one larger buffer.
            buffer = np.concatenate([history, np.full(20_000, turn, np.int32)])
            response = Segment(
                buffer[len(history) : len(history) + 9], np.zeros(40_000, np.float32)[:9], ((7, 0, 9),)
            )
            record(sessions, buffer[: len(history)], response)
            history = np.concatenate([history, response.ids, ids(3)])
            del buffer, response
        del history
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held <= sessions.counts()["session_bytes"]


def test_numbers_are_written_in_pieces_as_json_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.session_trajectory._PIECE", 3)
    numbers = np.linspace(-3, 3, 10, dtype=np.float32)
    told = {"a": [numbers, ids(), {"b": None, 'c"': True}], "d": ids(1, 2, 3)}
    plain = {"a": [numbers.tolist(), [], {"b": None, 'c"': True}], "d": [1, 2, 3]}
    assert as_json(told) == json.dumps(plain)


def test_rewards_of_responses(sessions: Sessions) -> None:
    record(sessions, ids(5), sampled(10), name="c1")
    record(sessions, ids(5, 10, 6), sampled(11), name="c2")
    sessions.set_reward(ME, S, 1.0, "c2")
    told = told_of(sessions)
    assert ([each["reward"] for each in told["interactions"]], told["reward"]) == ([None, 1.0], None)
    with pytest.raises(InvalidArgument, match="interaction_id: 'c3' is no response"):
        sessions.set_reward(ME, S, 1.0, "c3")
    assert np.isfinite(np.float32(MOST_TURNS * LARGEST_REWARD))


def test_what_has_ended_takes_nothing_and_keeps_its_tokens(sessions: Sessions) -> None:
    record(sessions, ids(5), sampled(10))
    assert sessions.end(ME, S) == sessions.end(ME, S) == 1
    for refused in (
        lambda: sessions.begun(ME, S, [], "t"),
        lambda: record(sessions, ids(5, 10), sampled(1)),
        lambda: sessions.set_reward(ME, S, 1.0, ""),
    ):
        with pytest.raises(FailedPrecondition, match="has ended"):
            refused()
    assert told_of(sessions)["ended"]
    sessions.start(ME, "other", "t")
    sessions.remove(ME, S)
    for gone in (lambda: told_of(sessions), lambda: sessions.remove(ME, S)):
        with pytest.raises(NotFound, match="its tokens are lost"):
            gone()
    assert sessions.counts() == {"sessions": 1, "session_bytes": 1024, "session_forks_total": 0}


def test_anothers_session_is_none(sessions: Sessions) -> None:
    record(sessions, ids(5), sampled(10))
    for asked in (
        lambda: sessions.begun("other", S, [], "t"),
        lambda: sessions.trajectory("other", S),
        lambda: sessions.remove("other", S),
        lambda: sessions.start("other", S, "t"),
        lambda: sessions.end("other", S),
    ):
        with pytest.raises(NotFound):
            asked()
    sessions.start(ME, S, "t", "again", {"temperature": 1.0})
    sessions.start(ME, S, "t")
    with pytest.raises(InvalidArgument, match=r"temperature: 0\.7; should be 1\.0, as session-1 was started with"):
        sessions.start(ME, S, "t", "again", {"temperature": 0.7})
    assert len(told_of(sessions)["interactions"]) == 1


def test_tokens_of_another_tokenizer_are_not_gone_on_from(sessions: Sessions) -> None:
    """Sessions outlive replicas, in whose place may come those of another model."""
    record(sessions, ids(5), sampled(10))
    with pytest.raises(FailedPrecondition, match="holds tokens of another tokenizer"):
        sessions.begun(ME, S, [], "other")
    assert told_of(sessions)["sequences"][0]["ids"] == [5, 10]


def test_a_response_names_its_weights_also_where_versions_come_again(sessions: Sessions) -> None:
    for checksum in ("a", "b"):
        sessions.record(ME, S, "c", ids(5), sampled(10), b"", checksum)
    assert [each["weights_checksum"] for each in told_of(sessions)["interactions"]] == ["a", "b"]


def filled(sessions: Sessions, owner: str) -> int:
    """Starts sessions of a caller until one is refused; their number."""
    for number in range(100):
        try:
            sessions.start(owner, f"{owner}{number}", "t")
        except ResourceExhausted:
            return number
    raise AssertionError("none was refused")


@pytest.mark.parametrize(("what", "each"), [("MOST_SESSIONS", 1), ("MOST_BYTES", 1024)])
def test_a_caller_that_fills_its_part_leaves_room_for_others(
    monkeypatch: pytest.MonkeyPatch, what: str, each: int
) -> None:
    """An empty session counts as 1024 bytes."""
    monkeypatch.setattr(module, what, 24 * each)
    sessions = Sessions()
    for number in range(20):  # callers that are gone have no part
        sessions.start(f"gone{number}", "gone", "t")
        sessions.remove(f"gone{number}", "gone")
    assert [filled(sessions, owner) for owner in ("a", "b", "c", "d")] == [12, 12, 4, 3]
    with pytest.raises(ResourceExhausted, match=f"a has {12 * each} .* is {3 * each} of a caller, as all have "):
        sessions.start("a", "other", "t")
    sessions.start("e", "e", "t")
    assert sessions.begun("e", "e", [], "t").turn == 0


def test_what_others_hold_refuses_no_turn_of_a_callers_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 24 * 1024)
    sessions = Sessions()
    for number in range(11):
        sessions.start(ME, f"mine{number}", "t")
    for other in range(11):
        sessions.start(f"other{other}", f"other{other}", "t")
    assert sessions.begun(ME, "mine0", [], "t").turn == 0
    sessions.start(ME, "more", "t")


def test_sessions_are_bounded_in_number_bytes_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    sessions = Sessions(clock)
    monkeypatch.setattr(module, "MOST_SESSIONS", 4)
    for name in ("s1", "s2"):
        sessions.start(ME, name, "t")
    with pytest.raises(ResourceExhausted, match="me has 2 sessions, and the most is 2") as full:
        sessions.start(ME, "s3", "t")
    assert full.value.retry_after_s
    clock.now += KEPT_S - 1
    sessions.begun(ME, "s1", [], "t")
    clock.now += 2
    with pytest.raises(NotFound, match="s2 is not here: it was removed, or nothing was heard of it for long"):
        sessions.begun(ME, "s2", [], "t")
    assert sessions.counts()["sessions"] == 1
    sessions.record(ME, "s1", "c", ids(5), sampled(10), b"")
    for bound, most in (("MOST_TURNS", 1), ("MOST_OF_A_SESSION", 2064)):
        with monkeypatch.context() as bounded:
            bounded.setattr(module, bound, most)
            with pytest.raises(ResourceExhausted, match="s1 has 1 responses and 2064 bytes") as never:
                sessions.begun(ME, "s1", [], "t")
            assert never.value.retry_after_s is None
    monkeypatch.setattr(module, "MOST_BYTES", 2 * sessions.counts()["session_bytes"])
    for refused in (lambda: sessions.start(ME, "s5", "t"), lambda: sessions.begun(ME, "s1", [], "t")):
        with pytest.raises(ResourceExhausted, match=r"me has [0-9]+ bytes of sessions, and the most is "):
            refused()
    sessions.remove(ME, "s1")
    for name in ("s5", "s6"):
        sessions.start(ME, name, "t")
    clock.now += KEPT_S + 1
    sessions.start(ME, "s7", "t")
    clock.now += KEPT_S + 1
    assert sessions.counts()["sessions"] == 0


def test_several_are_started_all_or_none(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SESSIONS", 6)
    asked: list[tuple[str, str, dict[str, Any]]] = [(f"m{place}", "", {"seed": place}) for place in range(2)]
    sessions.start_all(ME, "t", asked)
    assert [sessions.begun(ME, name, [], "t").terms.seed for name, _, _ in asked] == [0, 1]
    with pytest.raises(ResourceExhausted):
        sessions.start_all(ME, "t", [(f"n{place}", "", {}) for place in range(2)])
    assert sessions.counts()["sessions"] == 3


@pytest.mark.parametrize("wrong", [("new", {}), ("found", {"seed": 9})], ids=["no room", "other terms"])
def test_several_that_are_refused_leave_those_that_were_there_as_they_were(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, dict[str, Any]]
) -> None:
    monkeypatch.setattr(module, "MOST_SESSIONS", 6)
    record(sessions, ids(5), sampled(10))
    sessions.start(ME, "found", "t", "", {"seed": 1})
    name, terms = wrong
    with pytest.raises((ResourceExhausted, InvalidArgument)):
        sessions.start_all(ME, "t", [(S, "", {}), ("first", "", {}), (name, "", terms)])
    assert sessions.counts()["sessions"] == 2
    assert sessions.trajectory(ME, S)["sequences"][0]["ids"].tolist() == [5, 10]


def test_several_are_told_and_others_removed_at_once(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions.start(ME, "other", "t")
    record(sessions, ids(5), sampled(10))
    first, lost, second = sessions.trajectories(ME, [S, "gone", "other"], remove=["gone", "never"])
    assert as_json(first) == as_json(sessions.trajectory(ME, S))
    assert (lost["session_id"], second["session_id"]) == ("gone", "other")
    assert "gone is not here" in lost["error"]
    [others] = sessions.trajectories("another", [S])
    assert f"{S} is not here" in others["error"]
    # As many as an answer may hold, and one at least.
    monkeypatch.setattr(module, "MOST_OF_A_SESSION", 1)
    assert len(sessions.trajectories(ME, [S, "other"])) == 1
    assert sessions.trajectories(ME, [], remove=[S, "other"]) == []
    assert sessions.counts()["sessions"] == 0
