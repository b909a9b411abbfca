"""Requests that no client would send: drawn from the contracts themselves, so that a new field is fuzzed at once."""

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from grpc_health.v1 import health_pb2

from protos import critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from quartet.columns import Columns

KINDS = ("structured", "mutated", "random")
APPLICATIONS = {"Rollout": "rollout", "Reward": "reward", "Reference": "reference", "Critic": "critic"}
SERVICES = [
    module.DESCRIPTOR.services_by_name[name]
    for module, name in zip((rollout_pb2, reward_pb2, reference_pb2, critic_pb2), APPLICATIONS, strict=True)
]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
METHODS: list[MethodDescriptor] = [method for service in (*SERVICES, HEALTH) for method in service.methods]
_NO_METHODS = (b"Nothing", b"", b"Info/Info", b"\xff\xfe", b"Inf\xc3(", b"\x00", b"I" * 5000)

_INTEGERS = (0, 1, 2, 3, 7, 64, 127, -1, 2**31 - 1, -(2**31))
_LONGS = (*_INTEGERS, 2**63 - 1, -(2**63))
_FLOATS = (0.0, 1.0, 0.5, -1.0, 1e-30, 1e38, float("nan"), float("inf"), float("-inf"))
_STRINGS = ("", "w5", "w5 w6 w7", "naïve ✓", "\x00", "..", "a" * 5000, "%s%n{0}", "keep", "127.0.0.1")
_SPECIAL_METADATA: tuple[tuple[str, str | bytes], ...] = (
    ("application", "rollout"),
    ("application", "nonet"),
    ("application", ""),
    ("application", "Reward ?"),
    ("request_id", "x" * 300),
    ("multiplexed_model_id", "other"),
    ("quartet-run", "a/../b"),
    ("trace-bin", b"\xff\x00\xfe"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One call to make."""

    number: int
    kind: str
    method: bytes
    """Path of the method, such as `/quartet.v1.Reward/Score`; not UTF-8 for some that do not exist."""
    streams: bool
    """The reply is a stream."""
    data: bytes
    metadata: tuple[tuple[str, str | bytes], ...]
    leave_after: int | None
    """Messages of the stream after which the caller leaves; None reads to the end."""


def requests(seed: int, count: int) -> Iterator[Request]:
    """`count` requests; the same ones for the same seed and contracts."""
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        method = rng.choice(METHODS)
        kind = rng.choices(KINDS, (6, 3, 1))[0]
        name = method.name.encode() if rng.random() > 0.02 else rng.choice(_NO_METHODS)
        yield Request(
            number=number,
            kind=kind,
            method=b"/%s/%s" % (method.containing_service.full_name.encode(), name),
            streams=method.server_streaming,
            data=body(rng, kind, method.input_type),
            metadata=_metadata(rng, APPLICATIONS.get(method.containing_service.name, "")),
            leave_after=rng.choice((0, 1, 2)) if method.server_streaming and rng.random() < 0.3 else None,
        )


def body(rng: random.Random, kind: str, of: Descriptor) -> bytes:
    """A message of type `of`, one with a few bytes changed, or bytes without a meaning."""
    if kind == "random":
        return rng.randbytes(rng.choice((0, 1, 3, 17, 200, 5000)))
    data = bytearray(message(rng, of).SerializeToString())
    if kind == "mutated":
        for _ in range(rng.randint(1, 4)):
            _mutate(rng, data)
    return bytes(data)


def _metadata(rng: random.Random, application: str) -> tuple[tuple[str, str | bytes], ...]:
    draw = rng.random()
    if draw < 0.85:
        return (("application", application),)
    if draw < 0.9:
        return ()
    some = rng.sample(_SPECIAL_METADATA, rng.randint(1, 3))
    return (("application", application), *some) if draw < 0.95 else tuple(some)


def _mutate(rng: random.Random, data: bytearray) -> None:
    """Flips, cuts, repeats or inserts a few bytes, in place."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(4):
        case 0 if data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        case 1:
            del data[at : at + rng.randint(1, 8)]
        case 2:
            data[at:at] = data[at : at + rng.randint(1, 8)]
        case _:
            data[at:at] = rng.randbytes(rng.randint(1, 4))


def message(rng: random.Random, of: Descriptor) -> Any:
    """A message of type `of` with some fields set. Half of all token sequences and pairs make sense."""
    made = message_factory.GetMessageClass(of)()
    if rng.random() < 0.5 and _sensible(rng, made):
        return made
    for field in of.fields:
        if rng.random() < 0.7:
            _set(rng, made, field)
    return made


def _sensible(rng: random.Random, made: Any) -> bool:
    """Fills the shared envelopes so that they pass the first checks; False for any other message."""
    match made.DESCRIPTOR.name:
        case "Sequences":
            _fill(rng, made, rng.randint(1, 4))
        case "ScoreRequest":
            made.tokens = _trajectories(rng)
        case "LogprobsRequest":
            made.trajectories = _trajectories(rng)
        case "ValuesRequest":
            made.trajectories = _trajectories(rng)
        case "SamplingParams":
            made.max_new_tokens = rng.randint(1, 8)
        case "GenerateRequest":  # with a version it would need a run's lease, and no stranger has one
            _fill(rng, made.prompts, rng.randint(1, 4))
            made.sampling.max_new_tokens = rng.randint(1, 8)
        case _:
            return False
    return True


def _trajectories(rng: random.Random, *columns: str) -> bytes:
    """Trajectories as they are packed, with columns of zeros per sampled token."""
    count = rng.choice((1, 1, 2, 3, 40))
    sides = [[[rng.randrange(4, 64)] * rng.randint(1, 20) for _ in range(count)] for _ in range(2)]
    made = Columns.of_pairs(*([np.asarray(row, np.int32) for row in side] for side in sides))
    numbers = {name: np.zeros(made.size("sampled"), np.float32) for name in columns}
    return made.with_sampled(**numbers).pack()


def _fill(rng: random.Random, sequences: Any, count: int) -> None:
    lengths = [rng.randint(1, 20) for _ in range(count)]
    ids = [rng.randrange(4, 64) for _ in range(sum(lengths))]
    sequences.lengths = struct.pack(f"<{count}i", *lengths)
    sequences.token_ids = struct.pack(f"<{len(ids)}i", *ids)


def _set(rng: random.Random, made: Any, field: FieldDescriptor) -> None:
    if field.is_repeated:
        if field.message_type and field.message_type.GetOptions().map_entry:
            return
        values = getattr(made, field.name)
        for _ in range(rng.randint(0, 3)):
            if field.message_type:
                values.add().CopyFrom(message(rng, field.message_type))
            else:
                values.append(_value(rng, field))
    elif field.message_type:
        getattr(made, field.name).CopyFrom(message(rng, field.message_type))
    else:
        setattr(made, field.name, _value(rng, field))


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_INT32:
            return rng.choice(_INTEGERS)
        case FieldDescriptor.CPPTYPE_INT64:
            return rng.choice(_LONGS)
        case FieldDescriptor.CPPTYPE_UINT32:
            return abs(rng.choice(_INTEGERS)) % 2**32
        case FieldDescriptor.CPPTYPE_UINT64:
            return abs(rng.choice(_LONGS)) % 2**64
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM if field.enum_type is not None:
            return rng.choice([*field.enum_type.values_by_number, 99])
        case _ if field.type == FieldDescriptor.TYPE_BYTES:
            return _packed(rng)
        case _:
            return rng.choice(_STRINGS)


def _packed(rng: random.Random) -> bytes:
    """Packed numbers, a batch, or bytes that are neither."""
    count = rng.choice((0, 1, 2, 5, 40))
    match rng.randrange(5):
        case 4:
            return _trajectories(rng, *rng.choice(((), ("values", "returns"))))
        case 0:
            return struct.pack(f"<{count}i", *(rng.choice(_INTEGERS) for _ in range(count)))
        case 1:
            return struct.pack(f"<{count}f", *(rng.choice(_FLOATS) for _ in range(count)))
        case 2:
            return struct.pack(f"<{count}q", *(rng.choice(_LONGS) for _ in range(count)))
        case _:
            return rng.randbytes(count)
