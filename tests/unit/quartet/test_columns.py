"""Columns against plain lists: the same trajectories as lists of segments, written out in the most obvious way."""

import pickle
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quartet.columns import Columns, Field
from quartet.wire.errors import InvalidArgument

SCHEMA = {
    "number": Field("row", "int64"),
    "truncated": Field("row", "bool"),
    "score": Field("row"),
    "position": Field("token", "int32"),
    "logprobs": Field("sampled"),
    "trained": Field("sampled", "bool"),
    "values": Field("sampled", optional=True),
}


@dataclass
class Plain:
    """One trajectory as lists."""

    segments: list[tuple[bool, list[int]]]
    """Tokens of each segment, and True if they were sampled."""
    number: int
    truncated: bool
    score: float
    logprobs: list[float]
    trained: list[bool]

    @property
    def ids(self) -> list[int]:
        return [token for _, tokens in self.segments for token in tokens]

    @property
    def sampled(self) -> list[bool]:
        return [sampled for sampled, tokens in self.segments for _ in tokens]


def a_trajectory(rng: np.random.Generator, number: int) -> Plain:
    """One to five segments, the first given, some of one token; so there are trajectories of which nothing was
    sampled, and single tokens."""
    count = int(rng.integers(1, 6))
    segments = [(part % 2 == 1, rng.integers(0, 99, rng.choice([1, 1, 2, 5])).tolist()) for part in range(count)]
    many = sum(len(tokens) for sampled, tokens in segments if sampled)
    return Plain(
        segments,
        number,
        bool(rng.random() < 0.5),
        float(np.float32(rng.normal())),
        rng.normal(size=many).astype(np.float32).tolist(),
        (rng.random(many) < 0.5).tolist(),
    )


def packed(rows: list[Plain]) -> Columns:
    """The same as Columns."""

    def end_to_end(parts: list[list[Any]], dtype: Any) -> Any:
        return np.asarray([value for part in parts for value in part], dtype)

    columns = Columns(
        end_to_end([row.ids for row in rows], np.int32),
        np.asarray([len(row.ids) for row in rows], np.int32),
        end_to_end([row.sampled for row in rows], np.bool_),
        {"position": ("token", end_to_end([list(range(len(row.ids))) for row in rows], np.int32))},
    )
    return columns.with_rows(
        number=np.asarray([row.number for row in rows], np.int64),
        truncated=np.asarray([row.truncated for row in rows], np.bool_),
        score=np.asarray([row.score for row in rows], np.float32),
    ).with_sampled(
        logprobs=end_to_end([row.logprobs for row in rows], np.float32),
        trained=end_to_end([row.trained for row in rows], np.bool_),
    )


def same(columns: Columns, rows: list[Plain]) -> None:
    """Asserts that the columns are those of the rows, read row by row."""
    assert len(columns) == len(rows)
    assert [ids.tolist() for ids in columns.rows("ids")] == [row.ids for row in rows]
    assert [marks.tolist() for marks in columns.rows("sampled")] == [row.sampled for row in rows]
    assert [values.tolist() for values in columns.rows("logprobs")] == [row.logprobs for row in rows]
    assert [marks.tolist() for marks in columns.rows("trained")] == [row.trained for row in rows]
    assert [places.tolist() for places in columns.rows("position")] == [list(range(len(row.ids))) for row in rows]
    for name in ("number", "truncated", "score"):
        assert columns[name].tolist() == [getattr(row, name) for row in rows]


@pytest.fixture(params=range(12))
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


@pytest.fixture
def rows(rng: np.random.Generator) -> list[Plain]:
    return [a_trajectory(rng, number) for number in range(int(rng.choice([1, 2, 7, 40])))]


def test_packs_and_unpacks(rows: list[Plain]) -> None:
    columns = packed(rows)
    data = columns.pack()
    again = Columns.unpack(data, SCHEMA)
    same(again, rows)
    assert again.pack() == data
    assert again.digest() == columns.digest()
    assert len(data) == columns.nbytes
    assert Columns.measure(data) == (len(rows), sum(len(row.ids) for row in rows))
    same(pickle.loads(pickle.dumps(columns)), rows)


def test_takes_rows_in_any_order_and_more_than_once(rng: np.random.Generator, rows: list[Plain]) -> None:
    columns = packed(rows)
    some = [rng.permutation(len(rows)).tolist(), rng.integers(0, len(rows), 9).tolist()]
    for chosen in (*some, range(len(rows) // 2, len(rows)), []):
        same(columns.take(chosen), [rows[index] for index in chosen])


def test_consecutive_rows_are_views(rows: list[Plain]) -> None:
    columns = packed(rows)
    taken = columns.take(range(len(rows)))
    assert np.shares_memory(taken.ids, columns.ids)
    assert np.shares_memory(taken["score"], columns["score"])


def test_concatenates_what_was_divided(rng: np.random.Generator, rows: list[Plain]) -> None:
    columns = packed(rows)
    cuts = sorted({0, len(rows), *rng.integers(0, len(rows) + 1, 3).tolist()})
    parts = [columns.take(range(start, end)) for start, end in pairwise(cuts)]
    again = Columns.concatenate(parts)
    same(again, rows)
    assert again.pack() == columns.pack()


def test_pads_on_the_right_and_back(rows: list[Plain]) -> None:
    columns = packed(rows)
    padded = columns.padded("logprobs")
    most = max(len(row.logprobs) for row in rows)
    assert padded.tolist() == [row.logprobs + [0.0] * (most - len(row.logprobs)) for row in rows]
    assert columns.present.tolist() == [
        [True] * len(row.logprobs) + [False] * (most - len(row.logprobs)) for row in rows
    ]
    assert columns.unpadded(padded).tolist() == columns["logprobs"].tolist()


def test_owners_and_places_of_sampled_tokens(rows: list[Plain]) -> None:
    columns = packed(rows)
    assert columns.counts.tolist() == [len(row.logprobs) for row in rows]
    assert columns.owners.tolist() == [index for index, row in enumerate(rows) for _ in row.logprobs]
    flat = [sampled for row in rows for sampled in row.sampled]
    assert columns.sampled_at.tolist() == [at for at, sampled in enumerate(flat) if sampled]


def test_a_prompt_and_its_response() -> None:
    columns = Columns.of_pairs(
        [np.asarray([1, 2], np.int32), np.asarray([3], np.int32)],
        [np.asarray([4], np.int32), np.asarray([5, 6, 7], np.int32)],
    )
    assert columns.ids.tolist() == [1, 2, 4, 3, 5, 6, 7]
    assert [row.tolist() for row in columns.prompts] == [[1, 2], [3]]
    assert [row.tolist() for row in columns.responses] == [[4], [5, 6, 7]]
    assert columns.single_turn


def test_three_segments_of_which_one_was_sampled_are_not_a_single_turn() -> None:
    ids, lengths = np.arange(6, dtype=np.int32), np.asarray([6], np.int32)
    columns = Columns.of(ids, lengths, np.asarray([False, False, True, True, False, False]))
    assert not columns.single_turn
    assert columns.counts.tolist() == [2]
    assert columns.prompts[0].tolist() == [0, 1]
    assert columns.responses[0].tolist() == [2, 3, 4, 5]
    assert columns.response_mask.tolist() == [True, True, False, False]
    assert columns.on_responses(np.asarray([7, 8])).tolist() == [7, 8, 0, 0]


def test_steps_count_from_the_first_token_of_each_sampled_segment() -> None:
    """q q A A t B B B, then q C, then q q D t t E."""
    ids, lengths = np.arange(16, dtype=np.int32), np.asarray([8, 2, 6], np.int32)
    sampled = np.asarray([0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1], bool)
    columns = Columns.of(ids, lengths, sampled)
    assert columns.turn_steps is not None
    steps = np.concatenate(columns.turn_steps)[columns.response_mask]
    assert [len(row) for row in columns.turn_steps] == [6, 1, 4]
    assert steps.tolist() == [0, 1, 0, 1, 2, 0, 0, 0]
    assert [[part.tolist() for part in columns.segments(row)] for row in range(3)] == [
        [[2, 3], [4], [5, 6, 7]],
        [[9]],
        [[12], [13, 14], [15]],
    ]
    alone = columns.take([1])
    assert alone.turn_steps is None
    # A trajectory of which nothing was sampled, at the end.
    given = Columns.of(ids, lengths, np.where(np.arange(16) < 10, sampled, False))
    assert given.turn_steps is not None
    assert [len(row) for row in given.turn_steps] == [6, 1, 0]


def test_columns_are_replaced_selected_and_left_out() -> None:
    columns = packed([a_trajectory(np.random.default_rng(0), 0)])
    changed = columns.with_rows(score=np.asarray([2.5], np.float32))
    assert changed["score"].tolist() == [2.5]
    assert columns["score"].tolist() != [2.5]
    assert set(columns.select("score", "trained").columns) == {"score", "trained"}
    assert "score" not in columns.without("score", "unknown")
    assert columns.get("unknown") is None
    assert changed.get("score") is changed["score"]
    with pytest.raises(KeyError, match="unknown"):
        columns.select("unknown")


def test_no_trajectories_at_all() -> None:
    columns = packed([])
    assert Columns.unpack(columns.pack(), SCHEMA).pack() == columns.pack()
    assert columns.padded("logprobs").shape == (0, 0)


@pytest.mark.parametrize(
    ("column", "columns"),
    [
        ("score", {"score": ("row", np.zeros(3, np.float32))}),
        ("values", {"values": ("sampled", np.zeros(2, np.float32))}),
        ("position", {"position": ("token", np.zeros(2, np.int32))}),
        ("double", {"double": ("row", np.zeros(2, np.float64))}),
        ("square", {"square": ("row", np.zeros((2, 2), np.float32))}),
        ("ids", {"ids": ("token", np.zeros(4, np.int32))}),
    ],
)
def test_a_column_that_does_not_fit_is_named(column: str, columns: dict[str, Any]) -> None:
    sampled = np.asarray([False, True, False, False])
    with pytest.raises(ValueError, match=f"^{column}: "):
        Columns(np.zeros(4, np.int32), np.asarray([2, 2], np.int32), sampled, columns)


@pytest.mark.parametrize(
    ("lengths", "sampled", "named"),
    [
        ([2, 0, 2], [False, True, False, True], r"lengths\[1\]"),
        ([2, 1], [False, True, False, True], "ids"),
        ([2, 2], [False, True, True, True], "sampled: trajectory 1"),
        ([2, 2], [False, True, False], "sampled"),
    ],
)
def test_trajectories_that_cannot_be(lengths: list[int], sampled: list[bool], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Columns.of(np.zeros(4, np.int32), np.asarray(lengths, np.int32), np.asarray(sampled))


def test_parts_with_different_columns_are_refused() -> None:
    columns = packed([a_trajectory(np.random.default_rng(0), 0)])
    with pytest.raises(ValueError, match=r"^score: .*missing"):
        Columns.concatenate([columns, columns.without("score")])
    with pytest.raises(ValueError, match=r"^score: .*float32 .*int32"):
        Columns.concatenate([columns, columns.with_rows(score=np.zeros(1, np.int32))])


def test_a_row_that_does_not_exist() -> None:
    with pytest.raises(IndexError):
        packed([a_trajectory(np.random.default_rng(0), 0)]).take([1])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (lambda c: c.without("score"), "score: missing"),
        (lambda c: c.with_rows(more=np.zeros(len(c), np.float32)), "more: not expected"),
        (lambda c: c.with_rows(score=np.zeros(len(c), np.int32)), "score: is int32"),
        (lambda c: c.with_rows(logprobs=np.zeros(len(c), np.float32)), "logprobs: is float32 per trajectory"),
        (lambda c: c.with_rows(score=np.full(len(c), np.nan, np.float32)), r"score\[0\] is nan"),
    ],
)
def test_bytes_with_other_columns_name_the_wrong_one(changed: Any, named: str) -> None:
    columns = changed(packed([a_trajectory(np.random.default_rng(seed), seed) for seed in range(5)]))
    with pytest.raises(InvalidArgument, match=rf"^batch\.{named}"):
        Columns.unpack(columns.pack(), SCHEMA, "batch")


@pytest.mark.parametrize("several", [False, True])
def test_no_damage_passes_unseen(several: bool) -> None:
    """Each byte of the header, and each length of the whole: an error that names the field, or equal content."""
    columns = packed([a_trajectory(np.random.default_rng(seed), seed) for seed in range(3)])
    if several:
        columns = Columns(columns.ids, columns.lengths, columns.sampled, columns.columns, further(columns))
    data = columns.pack()
    for end in range(len(data)):
        with pytest.raises(InvalidArgument, match=r"^columns"):
            Columns.unpack(data[:end], SCHEMA)
    with pytest.raises(InvalidArgument, match=r"^columns"):
        Columns.unpack(data + b"\0", SCHEMA)
    for at in range(len(columns.buffers()[0])):
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(InvalidArgument, match=r"^columns"):
                Columns.unpack(bytes(broken), SCHEMA)


def test_random_bytes_are_refused(rng: np.random.Generator) -> None:
    for size in (0, 3, 4, 5, 64, 999):
        with pytest.raises(InvalidArgument, match=r"^columns"):
            Columns.unpack(rng.bytes(size), SCHEMA)


def test_booleans_are_0_or_1() -> None:
    columns = packed([a_trajectory(np.random.default_rng(1), 1)])
    data = bytearray(columns.pack())
    data[-1] = 2
    with pytest.raises(InvalidArgument, match="must be 0 or 1"):
        Columns.unpack(bytes(data), SCHEMA)


def test_marks_must_be_as_many_as_the_header_says() -> None:
    columns = Columns.of(np.zeros(3, np.int32), np.asarray([3], np.int32), np.asarray([False, True, False]))
    data = bytearray(columns.pack())
    data[-1] = 1
    with pytest.raises(InvalidArgument, match=r"^columns\.sampled: marks 2"):
        Columns.unpack(bytes(data), {})


def test_ids_and_lengths_beyond_a_model_are_named() -> None:
    columns = Columns.of_pairs([np.asarray([1, 2], np.int32)], [np.asarray([9], np.int32)])
    columns.check_model(vocab_size=10, max_length=3)
    with pytest.raises(InvalidArgument, match=r"batch\.ids\[2\]: 9"):
        columns.check_model(vocab_size=9, max_length=3, field="batch")
    with pytest.raises(InvalidArgument, match=r"batch\.lengths\[0\]: 3"):
        columns.check_model(vocab_size=10, max_length=2, field="batch")
    negative = Columns.of_pairs([np.asarray([1, -1], np.int32)], [np.asarray([9], np.int32)])
    with pytest.raises(InvalidArgument, match=r"batch\.ids\[1\]: -1 is outside the vocabulary \(0 to 9\)"):
        negative.check_model(vocab_size=10, max_length=3, field="batch")


@pytest.mark.parametrize(
    ("sampled", "named"),
    [
        ([False, True, False, True], ""),
        ([False, True, False, False], r"rows\.sampled: trajectory 1 has no sampled token"),
        ([False, False, False, True], r"rows\.sampled: trajectory 0 has no sampled token"),
        ([], "rows: empty; send at least one trajectory"),
    ],
)
def test_each_trajectory_that_is_received_has_something_to_compute(sampled: list[bool], named: str) -> None:
    columns = Columns.of(
        np.arange(len(sampled), dtype=np.int32),
        np.full(len(sampled) // 2, 2, np.int32),
        np.asarray(sampled, np.bool_),
    )
    options: dict[str, Any] = {"vocab_size": 4, "max_length": 2, "field": "rows"}
    if not named:
        assert Columns.received(columns.pack(), {}, **options).sampled.tolist() == sampled
        return
    with pytest.raises(InvalidArgument, match=f"^{named}"):
        Columns.received(columns.pack(), {}, **options)


def further(columns: Columns) -> Any:
    """Marks the first place at which a further sequence may begin."""
    given, marks = ~columns.sampled, np.zeros(columns.tokens, np.bool_)
    places = [at for at in columns.sampled_at[:-1] + 1 if given[at] and columns.sampled[at + 1 :].any()]
    marks[next(at for at in places if at not in columns.starts)] = True
    return marks


def of_sequences(*trajectories: list[list[int]]) -> Columns:
    """Trajectories of sequences of tokens, of which those from 100 on were sampled; and a column of each kind."""
    parts = [np.asarray(part, np.int32) for each in trajectories for part in each]
    firsts = [place == 0 for each in trajectories for place in range(len(each))]
    begins = [np.arange(len(part)) == (0 if not first else -1) for part, first in zip(parts, firsts, strict=True)]
    ids, lengths = np.concatenate(parts), [sum(map(len, each)) for each in trajectories]
    columns = Columns.of(ids, np.asarray(lengths, np.int32), ids >= 100, np.concatenate(begins))
    return columns.with_rows(number=np.arange(len(lengths))).with_sampled(versions=ids[ids >= 100])


TWO = [[1, 2, 100, 3, 101], [4, 102, 103]]
ONE = [[5, 104, 105]]
THREE = [[6, 106], [7, 8, 9, 107], [10, 108]]


def test_a_trajectory_of_several_sequences() -> None:
    columns = of_sequences(TWO, ONE, THREE)
    assert columns.sequence_lengths.tolist() == [5, 3, 3, 2, 4, 2]
    assert columns.counts.tolist() == [4, 2, 3]
    assert not columns.single_turn
    assert columns.sequence_owners.tolist() == [0, 0, 1, 2, 2, 2]
    assert [part.tolist() for part in columns.segments(0)] == [[100], [3], [101], [4], [102, 103]]
    assert columns.turn_steps is not None
    assert np.concatenate(columns.turn_steps)[columns.response_mask].tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 0]


def test_a_sequence_may_begin_right_behind_given_tokens() -> None:
    columns = of_sequences([[1, 100, 2], [3, 101]])
    assert [part.tolist() for part in columns.segments(0)] == [[100], [2], [3], [101]]


def test_sequences_stay_with_their_trajectories() -> None:
    whole = of_sequences(TWO, ONE, THREE)
    for rows, wanted in (([2, 0], (THREE, TWO)), ([1, 2], (ONE, THREE)), ([1], (ONE,))):
        taken, expected = whole.take(rows), of_sequences(*wanted)
        assert taken.select().pack() == expected.select().pack()
        assert (taken.begins is None) == (wanted == (ONE,))
    parts = [whole.take([0]), whole.take([1]), whole.take([2])]
    assert Columns.concatenate(parts).pack() == whole.pack()
    assert whole.select("number").without("number").begins is whole.begins
    assert pickle.loads(pickle.dumps(whole)).pack() == whole.pack()
    schema = {"number": Field("row", "int64"), "versions": Field("sampled", "int32")}
    read = Columns.unpack(whole.pack(), schema)
    assert read.pack() == whole.pack()
    assert read.begins is not None
    # Marks that mark nothing are left out, as equal trajectories have equal bytes.
    bare = whole.take([1])
    assert Columns.of(bare.ids, bare.lengths, bare.sampled, np.zeros(3, bool)).begins is None


def test_the_last_sequence_is_a_trajectory_of_its_own() -> None:
    columns = of_sequences(TWO, ONE, THREE)
    last = columns.last_sequences()
    assert last.begins is None
    assert [row.tolist() for row in last.rows("ids")] == [TWO[1], ONE[0], THREE[2]]
    assert last.counts.tolist() == [2, 2, 1]
    assert last["number"].tolist() == [0, 1, 2]
    assert last.get("versions") is None
    single = of_sequences(ONE)
    assert single.last_sequences() is single


def test_the_length_of_a_model_bounds_each_sequence() -> None:
    columns = of_sequences(TWO, ONE, THREE)
    columns.check_model(vocab_size=200, max_length=5)
    with pytest.raises(InvalidArgument, match=r"begins: sequence 0: 5 tokens exceed the model's max_length of 4"):
        columns.check_model(vocab_size=200, max_length=4)


@pytest.mark.parametrize(
    ("begins", "named"),
    [
        ([0, 0, 1, 0, 0], r"begins\[2\]: a sampled token"),
        ([1, 0, 0, 1, 0], "begins: marks the first token of a trajectory"),
        ([0, 0, 0, 1, 0, 0], "begins: 6 for 5 tokens"),
        ([0, 1, 0, 1, 0], "begins: the sequence from token 0 on has no sampled token"),
    ],
)
def test_sequences_that_cannot_be(begins: list[int], named: str) -> None:
    """Given 1 and 2, sampled 100, given 3, sampled 101."""
    ids = np.asarray([1, 2, 100, 3, 101], np.int32)
    with pytest.raises(ValueError, match=named):
        Columns.of(ids, np.asarray([5], np.int32), ids >= 100, np.asarray(begins, bool))


def test_marks_of_sequences_are_booleans_of_tokens() -> None:
    columns = of_sequences(TWO).select()
    as_row = columns.pack().replace(b'["begins","token","bool"]', b'["begins","token","int3"]')
    with pytest.raises(InvalidArgument, match=r"columns.begins"):
        Columns.unpack(as_row, {})
    with pytest.raises(ValueError, match="begins: is a column of every trajectory, and cannot be another"):
        columns.with_rows(begins=np.zeros(1, np.bool_))
