"""Pairs that no service can take, and what each must be told. The model: 335 rows, 128 tokens."""

from protos import common_pb2
from quartet.wire.codec import pack_ints, pack_sequences

Pairs, Sequences = common_pb2.Pairs, common_pb2.Sequences


def pairs(prompts: list[list[int]], responses: list[list[int]]) -> common_pb2.Pairs:
    """Pairs as they are, right or wrong."""
    return Pairs(prompts=pack_sequences(prompts), responses=pack_sequences(responses))


ONE = pairs([[5]], [[6]])
"""Nothing wrong with it."""


def _prompts(token_ids: list[int], lengths: list[int]) -> common_pb2.Pairs:
    return Pairs(
        prompts=Sequences(token_ids=pack_ints(token_ids), lengths=pack_ints(lengths)), responses=ONE.responses
    )


MALFORMED = {
    "nothing": (Pairs(), ": empty; send at least one prompt and response"),
    "no prompt tokens": (_prompts([5], [0, 1]), ".prompts.lengths[0]: 0; every sequence needs at least 1"),
    "no response tokens": (pairs([[5], [6]], [[7], []]), ".responses.lengths[1]: 0; every sequence needs"),
    "negative length": (_prompts([5], [2, -1]), ".prompts.lengths[1]: -1; every sequence needs at least 1"),
    "lengths and ids disagree": (_prompts([5, 6], [3]), ".prompts.lengths: add up to 3, but"),
    "huge length": (_prompts([5], [2**31 - 1] * 2), ".prompts.lengths: add up to 4294967294, but"),
    "half an id": (
        Pairs(prompts=Sequences(token_ids=b"12345"), responses=ONE.responses),
        ".prompts.token_ids: 5 bytes",
    ),
    "id beyond the vocabulary": (pairs([[5]], [[7, 335]]), ".responses.token_ids[1]: 335 is outside the voc"),
    "negative id": (pairs([[-1]], [[7]]), ".prompts.token_ids[0]: -1 is outside the vocabulary (0 to 334)"),
    "prompts without responses": (pairs([[5], [6]], [[7]]), ": 2 prompts but 1 responses"),
    "too long": (pairs([[5], [5] * 100], [[6], [6] * 29]), "[1]: 100 prompt + 29 response tokens exceed"),
}
