"""The beginnings of sequences that are kept, and the one among them that a sequence continues."""

import numpy as np
import torch

from quartet.models.attention.prefixes import MOST_ALIKE, Past, Prefix, Prefixes


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def prefix(*tokens: int, prompt: int = 1) -> Prefix:
    """Keys are the tokens and values their negatives; the answer of a token is a tenth of it."""
    keys = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None]
    answers = np.asarray([token / 10 for token in tokens[prompt:]], np.float32)
    return Prefix(ids(*tokens), prompt, {0: (keys, -keys)}, answers)


def test_a_sequence_continues_the_prefix_that_shares_most_of_it() -> None:
    prefixes = Prefixes(100)
    for kept in ((1, 2, 3), (1, 2, 4, 5), (1, 9)):
        prefixes.keep("key", prefix(*kept))
    taken = prefixes.take("key", ids(1, 2, 4, 6, 7, 8))
    assert taken is not None
    assert taken.ids.tolist() == [1, 2, 4]
    # The last token is computed again, as the next is predicted from it.
    assert [states.flatten().tolist() for states in taken.layers[0]] == [[1, 2], [-1, -2]]
    assert taken.answers.tolist() == np.asarray([0.2, 0.4], np.float32).tolist()
    assert prefixes.tokens == 5  # of the two that are left: each is continued once
    assert prefixes.take("key", ids(1, 2, 4, 6)).ids.tolist() == [1, 2]  # type: ignore[union-attr]


def test_at_least_one_token_is_left_to_compute() -> None:
    prefixes = Prefixes(100)
    prefixes.keep("key", prefix(1, 2, 3))
    assert prefixes.take("key", ids(1, 2, 3)).ids.tolist() == [1, 2]  # type: ignore[union-attr]


def test_keys_are_apart() -> None:
    prefixes = Prefixes(100)
    prefixes.keep(("cold", b"prompt"), prefix(1, 2, 3))
    assert prefixes.take(("hot", b"prompt"), ids(1, 2, 3, 4)) is None
    assert prefixes.take(("cold", b"other"), ids(1, 2, 3, 4)) is None
    assert prefixes.take(("cold", b"prompt"), ids(1, 2, 3, 4)) is not None
    assert prefixes.take(("cold", b"prompt"), ids(1, 2, 3, 4)) is None
    assert prefixes.tokens == 0


def test_no_more_is_kept_than_may_be_and_the_oldest_leaves_first() -> None:
    prefixes = Prefixes(7)
    for key in ("a", "b", "a", "c"):
        prefixes.keep(key, prefix(1, 2, 3))
        assert prefixes.tokens <= 7
    # "b" left for the second of "a", and the first of "a" for "c".
    assert prefixes.take("b", ids(1, 2, 3, 4)) is None
    assert [prefixes.take("a", ids(1, 2, 3, 4)) is None for _ in range(2)] == [False, True]
    prefixes.keep("long", prefix(*range(8)))
    assert prefixes.tokens == 3  # it is longer than all that may be kept, and drives none out


def test_so_many_prefixes_of_one_key_are_compared_at_most() -> None:
    prefixes = Prefixes(10_000)
    for last in range(MOST_ALIKE + 5):
        prefixes.keep("key", prefix(1, 2, 10 + last))
    assert prefixes.tokens == 3 * MOST_ALIKE
    assert prefixes.take("key", ids(1, 2, 14, 3)).ids.tolist() == [1, 2]  # type: ignore[union-attr]
    assert prefixes.take("key", ids(1, 2, 20, 3)).ids.tolist() == [1, 2, 20]  # type: ignore[union-attr]


def test_a_prefix_with_another_response_is_left_to_its_own_sequence() -> None:
    prefixes = Prefixes(100)
    prefixes.keep("key", prefix(1, 2, 3, 4, 5))
    assert prefixes.take("key", ids(1, 2, 7, 8, 9)) is None
    assert prefixes.take("key", ids(1, 2, 3, 8, 9)).ids.tolist() == [1, 2, 3]  # type: ignore[union-attr]


def test_keys_and_values_follow_those_of_the_prefix() -> None:
    past = Past([prefix(1, 2, 3).cut(3), None], [True, False])
    assert (past.starts, past.steps) == ([2, 0], [2, 0])
    row = torch.tensor([3.0, 4.0])[None, None, :, None]
    assert past.extended(0, 0, row, -row)[0].flatten().tolist() == [1, 2, 3, 4]
    assert past.extended(1, 0, row, -row)[0].flatten().tolist() == [3, 4]
    assert past.layers[0][0][1].flatten().tolist() == [-1, -2, -3, -4]
    assert past.layers[1] == {}
