"""Columns: B trajectories, all their numbers packed end to end in one array per name.

The same arrays are sent, kept on disk, given to ranks and read as tensors: what has been packed once is taken apart
only by the model. Three trajectories, of which upper-case tokens were sampled and the others given:

    ids        q q A A   q B   q q C t C C      lengths  [4, 2, 6]     N = 12 tokens
    sampled    . . T T   . T   . . T . T T      counts   [2, 1, 3]     M = 6 sampled tokens
    logprobs       a a     b       c   c c      one for each sampled token, [M]
    score      s         s     s                one for each trajectory, [B]

Index t of a trajectory's log-probs, values or advantages is its sampled token t: response token t, where a prompt has
one response.

A trajectory may be several sequences, such as those of an agent that shortened its history: a token attends to those
before it in its own sequence alone, while rewards, advantages and denominators are the whole trajectory's.

    ids        q q A A h B B   begins   . . . . T . .   two sequences: q q A A and h B B
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from quartet.wire.errors import InvalidArgument
from quartet.wire.ragged import Ragged

Kind = Literal["row", "token", "sampled"]
"""A column has one number for each trajectory [B], for each token [N], or for each sampled token [M]."""
Array = NDArray[Any]

DTYPES = ("bool", "float32", "int32", "int64")
"""Types of numbers that a column may have."""
STRUCTURE = ("ids", "lengths", "sampled")
"""Names of the arrays that every Columns has."""
BEGINS = "begins"
"""Name of the array that one with trajectories of several sequences has besides."""
_LONGEST_HEADER = 1 << 16
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Field:
    """A column as its reader expects it."""

    kind: Kind
    dtype: str = "float32"
    """One of DTYPES."""
    optional: bool = False
    """True if it may be missing."""


Schema = Mapping[str, Field]
"""Columns by name that a reader expects, besides STRUCTURE; all others are errors."""


@dataclass(frozen=True, eq=False)
class Columns:
    """B trajectories with N tokens, M of them sampled. Arrays are shared between Columns and must not be changed."""

    ids: NDArray[np.int32]
    """[N] token ids."""
    lengths: NDArray[np.int32]
    """[B] tokens of each trajectory, at least 1."""
    sampled: NDArray[np.bool_]
    """[N] True at tokens that were sampled, False at those that were given. A trajectory may have none that were, but
    never begins with one, since nothing would come before it."""
    columns: Mapping[str, tuple[Kind, Array]]
    """The other columns by name: kind and numbers."""
    begins: NDArray[np.bool_] | None = None
    """[N] True at the first token, a given one, of each further sequence of a trajectory; None where each is one
    sequence. Of several sequences each has a sampled token."""

    def __post_init__(self) -> None:
        """Raises ValueError if the arrays do not fit each other; the message names the column."""
        for name, dtype in zip(STRUCTURE, ("int32", "int32", "bool"), strict=True):
            _check_array(name, getattr(self, name), dtype)
        if len(self.lengths) and int(self.lengths.min()) < 1:
            row = int(np.argmin(self.lengths))
            raise ValueError(f"lengths[{row}]: {self.lengths[row]}; every trajectory needs at least 1 token")
        total = int(self.lengths.sum(dtype=np.int64))
        for name, values in (("ids", self.ids), ("sampled", self.sampled)):
            if len(values) != total:
                raise ValueError(f"{name}: {len(values)} for {total} tokens (lengths); there must be one per token")
        if total and (first := self.sampled[self.starts]).any():
            raise ValueError(
                f"sampled: trajectory {int(np.argmax(first))} begins with a sampled token; a given one must be first"
            )
        if self.begins is not None:
            self._check_sequences(self.begins)
        self._check_columns(self.columns)

    def _check_sequences(self, begins: NDArray[np.bool_]) -> None:
        _check_array(BEGINS, begins, "bool")
        if len(begins) != self.tokens:
            raise ValueError(
                f"{BEGINS}: {len(begins)} for {self.tokens} tokens (lengths); there must be one per token"
            )
        if (wrong := begins & self.sampled).any():
            raise ValueError(f"{BEGINS}[{int(np.argmax(wrong))}]: a sampled token; a given one must be first")
        if begins[self.starts].any():
            raise ValueError(f"{BEGINS}: marks the first token of a trajectory; should mark further sequences alone")
        firsts, owners = _starts(self.sequence_lengths), self.sequence_owners
        idle = np.add.reduceat(self.sampled, firsts, dtype=np.int64) == 0
        if (wrong := idle & (np.bincount(owners)[owners] > 1)).any():
            at = int(firsts[np.argmax(wrong)])
            raise ValueError(f"{BEGINS}: the sequence from token {at} on has no sampled token; should have one")

    def _check_columns(self, columns: Mapping[str, tuple[Kind, Array]]) -> None:
        for name, (kind, values) in columns.items():
            if name in (*STRUCTURE, BEGINS):
                raise ValueError(f"{name}: is a column of every trajectory, and cannot be another")
            if (dtype := _name(values)) not in DTYPES:
                raise ValueError(f"{name}: is {values.dtype}; must be one of {', '.join(DTYPES)}")
            _check_array(name, values, dtype)
            if len(values) != (most := self.size(kind)):
                raise ValueError(f"{name}: {len(values)} values for {most}; there must be one per {_EACH[kind]}")

    @classmethod
    def of(cls, ids: Array, lengths: Array, sampled: Array, begins: Array | None = None) -> Self:
        """Trajectories without further columns."""
        return cls(ids, lengths, sampled, {}, _some(begins))

    @classmethod
    def of_pairs(cls, prompts: Sequence[Array], responses: Sequence[Array]) -> Self:
        """Trajectories of one given prompt [P] and one sampled response [T] each."""
        lengths = [len(part) for pair in zip(prompts, responses, strict=True) for part in pair]
        parts = [part for pair in zip(prompts, responses, strict=True) for part in pair]
        sampled = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        ids = np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32, copy=False)
        return cls.of(ids, np.asarray(lengths, np.int32).reshape(-1, 2).sum(1, dtype=np.int32), sampled)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was computed from the arrays, for another process."""
        return type(self), (self.ids, self.lengths, self.sampled, dict(self.columns), self.begins)

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Array:
        """The numbers of a column: [B], [N] or [M]. KeyError names those that there are."""
        return self._column(name)[1]

    def _column(self, name: str) -> tuple[Kind, Array]:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"{name}: no such column; there are {', '.join(sorted(self.columns)) or 'none'}") from None

    def get(self, name: str) -> Array | None:
        """The numbers of a column; None if it is missing."""
        return self.columns[name][1] if name in self.columns else None

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.ids)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """[B] index of each trajectory's first token in `ids`."""
        return _starts(self.lengths)

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """[S] tokens of each sequence, S = B where each trajectory is one."""
        if self.begins is None:
            return self.lengths
        firsts = np.union1d(self.starts, np.flatnonzero(self.begins))
        return np.diff(firsts, append=self.tokens).astype(np.int32)

    @cached_property
    def sequence_owners(self) -> NDArray[np.int64]:
        """[S] the trajectory of each sequence."""
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        return np.searchsorted(np.cumsum(self.lengths, dtype=np.int64), ends)

    @cached_property
    def sampled_at(self) -> NDArray[np.int64]:
        """[M] index of each sampled token in `ids`; it is predicted at the token before."""
        return np.flatnonzero(self.sampled)

    @cached_property
    def counts(self) -> NDArray[np.int32]:
        """[B] sampled tokens of each trajectory."""
        if not len(self):
            return np.empty(0, np.int32)
        return np.add.reduceat(self.sampled.view(np.uint8), self.starts, dtype=np.int32)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """[M] the trajectory of each sampled token."""
        return np.repeat(np.arange(len(self)), self.counts)

    @cached_property
    def prompt_lengths(self) -> NDArray[np.int32]:
        """[B] tokens before the first sampled one; all, where none was sampled."""
        firsts = self.lengths.copy()
        some = self.counts > 0
        firsts[some] = self.sampled_at[_starts(self.counts)[some]] - self.starts[some]
        return firsts

    @property
    def single_turn(self) -> bool:
        """True if each trajectory is a prompt and a sampled response, and not more."""
        return bool((self.lengths - self.prompt_lengths == self.counts).all())

    @cached_property
    def answered(self) -> NDArray[np.bool_]:
        """[N] True from each trajectory's first sampled token on."""
        if self.single_turn:
            return self.sampled
        return np.arange(self.tokens) >= np.repeat(self.starts + self.prompt_lengths, self.lengths)

    @cached_property
    def prompts(self) -> Ragged:
        """The tokens before the first sampled one of each trajectory."""
        return Ragged(self.ids[~self.answered], self.prompt_lengths)

    @cached_property
    def responses(self) -> Ragged:
        """The tokens from the first sampled one on, [T] of each trajectory; what was given in between is among them.
        For a model these are the response, and `response_mask` are those of its outputs that count."""
        return Ragged(self.ids[self.answered], self.lengths - self.prompt_lengths)

    @property
    def response_mask(self) -> NDArray[np.bool_]:
        """[sum of T] True at sampled tokens of `responses`."""
        return self.sampled[self.answered]

    @cached_property
    def turn_steps(self) -> list[Array] | None:
        """The index, from 0, of each sampled token in its segment, [T] for the `responses` of each trajectory; what
        stands at given tokens has no meaning. None if each has one segment, where it is the token's own index."""
        if self.single_turn:
            return None
        mask, at = self.response_mask, np.arange(len(self.response_mask), dtype=np.int32)
        first = mask & ~np.concatenate([[False], mask[:-1]])
        ends = self.responses.ends
        first[ends[ends < len(mask)]] = True
        return np.split(at - np.maximum.accumulate(np.where(first, at, 0)), ends[:-1])

    def apart(self) -> "Columns":
        """Each sequence as a trajectory of its own, as a model takes them, without the columns of one number per
        trajectory. The sampled tokens stay in their order."""
        if self.begins is None:
            return self
        columns = {name: column for name, column in self.columns.items() if column[0] != "row"}
        return Columns(self.ids, self.sequence_lengths, self.sampled, columns)

    def last_sequences(self) -> "Columns":
        """The last sequence of each trajectory as a trajectory of its own, with the columns of one number per
        trajectory."""
        if self.begins is None:
            return self
        rows = {name: values for name, (kind, values) in self.columns.items() if kind == "row"}
        last = np.searchsorted(self.sequence_owners, np.arange(len(self)), "right") - 1
        return self.select().apart().take(last).with_rows(**rows)

    def segments(self, row: int) -> list[Array]:
        """The ids of each segment of a trajectory after its prompt, as views: sampled, given, sampled."""
        start, end = int(self.starts[row]), int(self.starts[row] + self.lengths[row])
        response = slice(start + int(self.prompt_lengths[row]), end)
        changes = np.diff(self.sampled[response], prepend=True)
        # The first token was sampled, and begins nothing.
        changes = changes if self.begins is None else changes | self.begins[response]
        return np.split(self.ids[response], np.flatnonzero(changes))

    def on_responses(self, values: Array) -> Array:
        """[sum of T] a number for each token of `responses`, from one for each sampled token; zeros at given ones."""
        if self.single_turn:
            return values
        spread = np.zeros(len(self.response_mask), values.dtype)
        spread[self.response_mask] = values
        return spread

    def size(self, kind: Kind) -> int:
        """B, N or M."""
        return {"row": len(self), "token": self.tokens, "sampled": self._sampled_tokens}[kind]

    @cached_property
    def _sampled_tokens(self) -> int:
        """M."""
        return int(np.count_nonzero(self.sampled))

    def with_rows(self, **columns: Array) -> "Columns":
        """With these columns of one number per trajectory, in place of those of their names."""
        return self._with("row", columns)

    def with_sampled(self, **columns: Array) -> "Columns":
        """With these columns of one number per sampled token, in place of those of their names."""
        return self._with("sampled", columns)

    def _with(self, kind: Kind, columns: Mapping[str, Array]) -> "Columns":
        return self._like({**self.columns, **{name: (kind, values) for name, values in columns.items()}})

    def select(self, *names: str) -> "Columns":
        """With these columns only. KeyError if one is missing."""
        return self._like({name: self._column(name) for name in names})

    def without(self, *names: str) -> "Columns":
        """Without these columns, which may be missing."""
        return self._like({name: column for name, column in self.columns.items() if name not in names})

    def _like(self, columns: Mapping[str, tuple[Kind, Array]]) -> "Columns":
        """The same trajectories with these columns; what was computed of the trajectories stays."""
        self._check_columns(
            {name: column for name, column in columns.items() if self.columns.get(name) is not column}
        )
        made = object.__new__(Columns)
        made.__dict__.update(self.__dict__ | {"columns": columns})
        return made

    def take(self, rows: Sequence[int] | Array) -> "Columns":
        """The trajectories with these indices, in this order: one gather for each array, views where the rows follow
        each other."""
        chosen = np.asarray(rows, np.int64).reshape(-1)
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(self):
            raise IndexError(f"rows {int(chosen.min())} to {int(chosen.max())} of {len(self)} trajectories")
        consecutive = len(chosen) > 0 and bool((np.diff(chosen) == 1).all())
        at: dict[Kind, Any] = {}
        for kind, lengths in (("row", None), ("token", self.lengths), ("sampled", self.counts)):
            at[cast(Kind, kind)] = _places(chosen, lengths, consecutive)
        columns = {name: (kind, values[at[kind]]) for name, (kind, values) in self.columns.items()}
        begins = None if self.begins is None else _some(self.begins[at["token"]])
        return Columns(self.ids[at["token"]], self.lengths[at["row"]], self.sampled[at["token"]], columns, begins)

    def rows(self, name: str) -> list[Array]:
        """A column of tokens or sampled tokens as B views, one for each trajectory."""
        kind, values = self.columns[name] if name in self.columns else ("token", getattr(self, name))
        lengths = self.lengths if kind == "token" else self.counts
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def padded(self, name: str) -> Array:
        """A column of sampled tokens as [B, T], zeros on the right; T is the most that a trajectory has. A view where
        all have as many."""
        kind, values = self.columns[name]
        if kind != "sampled":
            raise ValueError(f"{name}: a column per {_EACH[kind]}; only those per sampled token are padded")
        if self.present.all():
            return values.reshape(self.present.shape)
        padded = np.zeros(self.present.shape, values.dtype)
        padded[self.present] = values
        return padded

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """[B, T] True where `padded` has a number of a token."""
        counts = self.counts
        return np.arange(int(counts.max()) if len(counts) else 0) < counts[:, None]

    def unpadded(self, padded: Array) -> Array:
        """[M] the numbers of [B, T] that belong to sampled tokens, the inverse of `padded`, and like it a view where
        all trajectories have as many."""
        return padded.reshape(-1) if self.present.all() else padded[self.present]

    @classmethod
    def concatenate(cls, parts: Sequence["Columns"]) -> "Columns":
        """The trajectories of all parts, at least one, in their order. ValueError, which names the column, unless all
        parts have the same ones."""
        first = parts[0]
        if len(parts) == 1:
            return first
        for part in parts[1:]:
            for name in sorted(first.columns.keys() | part.columns.keys()):
                kinds = [f"{_described(each, name)}" for each in (first, part)]
                if kinds[0] != kinds[1]:
                    raise ValueError(
                        f"{name}: {kinds[0]} in one part, {kinds[1]} in another; must be the same in all"
                    )
        ids, lengths, sampled = (np.concatenate([getattr(part, name) for part in parts]) for name in STRUCTURE)
        columns = {
            name: (kind, np.concatenate([part[name] for part in parts])) for name, (kind, _) in first.columns.items()
        }
        if all(part.begins is None for part in parts):
            return Columns(ids, lengths, sampled, columns)
        begins = [np.zeros(part.tokens, np.bool_) if part.begins is None else part.begins for part in parts]
        return Columns(ids, lengths, sampled, columns, np.concatenate(begins))

    def _arrays(self) -> list[tuple[str, Kind, Array]]:
        """All arrays in the order in which they are packed."""
        named: list[tuple[str, Kind, Array]] = [("ids", "token", self.ids), ("lengths", "row", self.lengths)]
        named += [("sampled", "token", self.sampled)]
        named += [] if self.begins is None else [(BEGINS, "token", self.begins)]
        named += [(name, kind, values) for name, (kind, values) in self.columns.items()]
        return sorted(named, key=lambda each: _place((each[0], each[1], _name(each[2]))))

    def buffers(self) -> list[bytes | memoryview]:
        """The bytes of `pack` in pieces, without a copy of the numbers."""
        arrays = self._arrays()
        sizes = (len(self), self.tokens, self.size("sampled"))
        header = _header(sizes, [(name, kind, _name(values)) for name, kind, values in arrays])
        return [header, *(_little(values).data.cast("B") for _, _, values in arrays if len(values))]

    @property
    def nbytes(self) -> int:
        """Length of what `pack` returns."""
        return sum(len(piece) for piece in self.buffers())

    def pack(self) -> bytes:
        """All of it as bytes: a header with the names, then each array, little-endian. Equal contents give equal
        bytes."""
        return b"".join(self.buffers())

    def digest(self) -> str:
        """sha256 of what `pack` returns."""
        total = hashlib.sha256()
        for piece in self.buffers():
            total.update(piece)
        return total.hexdigest()

    @classmethod
    def unpack(cls, data: bytes, schema: Schema, field: str = "columns") -> "Columns":
        """Reads what `pack` wrote; the arrays are views of `data`.

        Args:
            data: the bytes.
            schema: columns that the reader expects.
            field: name of the bytes in the error.

        Raises:
            InvalidArgument: the bytes are not those of trajectories with these columns, or a float is not finite.
        """
        header = _Header.read(data, field)
        header.check(schema, field)
        found: dict[str, tuple[Kind, Array]] = {}
        at = header.end
        for name, kind, dtype in header.named:
            values, at = _array(data, at, header.sizes[kind], dtype, f"{field}.{name}")
            found[name] = (kind, values)
        (_, ids), (_, lengths), (_, sampled) = (found.pop(name) for name in STRUCTURE)
        _, begins = found.pop(BEGINS, (None, None))
        if (marked := int(np.count_nonzero(sampled))) != header.sizes["sampled"]:
            raise InvalidArgument(f"{field}.sampled: marks {marked} tokens, not {header.sizes['sampled']}")
        try:
            return cls(ids, lengths, sampled, found, _some(begins))
        except ValueError as error:
            raise InvalidArgument(f"{field}.{error}") from None

    @staticmethod
    def measure(data: bytes, field: str = "columns") -> tuple[int, int]:
        """The trajectories and tokens that packed bytes hold, by their header, before anything else of them is read.
        InvalidArgument if the header is not that of Columns, or the number of bytes is another than it says."""
        if not data:
            raise InvalidArgument(f"{field}: empty; send at least one trajectory")
        header = _Header.read(data, field)
        return header.sizes["row"], header.sizes["token"]

    @classmethod
    def received(
        cls, data: bytes, schema: Schema, *, vocab_size: int, max_length: int, field: str = "trajectories"
    ) -> "Columns":
        """Reads what a caller sent for a model: at least one trajectory, each with a sampled token.

        Raises:
            InvalidArgument: as `unpack` and `check_model` do, or if something to be computed is missing.
        """
        columns = cls.unpack(data, schema, field)
        if not len(columns):
            raise InvalidArgument(f"{field}: empty; send at least one trajectory")
        columns.check_model(vocab_size=vocab_size, max_length=max_length, field=field)
        if not (columns.counts > 0).all():
            raise InvalidArgument(
                f"{field}.sampled: trajectory {int(np.argmin(columns.counts))} has no sampled token"
            )
        return columns

    def check_model(self, *, vocab_size: int, max_length: int, field: str = "columns") -> None:
        """Raises InvalidArgument, which names the place, unless every id is of the vocabulary and no sequence has
        more than `max_length` tokens."""
        if len(self.ids) and (int(self.ids.min()) < 0 or int(self.ids.max()) >= vocab_size):
            at = int(np.argmax((self.ids < 0) | (self.ids >= vocab_size)))
            raise InvalidArgument(
                f"{field}.ids[{at}]: {self.ids[at]} is outside the vocabulary (0 to {vocab_size - 1})"
            )
        lengths = self.sequence_lengths
        if len(self) and int(lengths.max()) > max_length:
            at = int(np.argmax(lengths))
            place = f"lengths[{at}]" if self.begins is None else f"{BEGINS}: sequence {at}"
            raise InvalidArgument(
                f"{field}.{place}: {lengths[at]} tokens exceed the model's max_length of {max_length}"
            )


_EACH: dict[Kind, str] = {"row": "trajectory", "token": "token", "sampled": "sampled token"}


_NAMES = {np.dtype(name): name for name in DTYPES}


def _name(values: Array) -> str:
    """Name of the type of its numbers; numpy takes microseconds to make it."""
    return _NAMES.get(values.dtype) or values.dtype.name


def _check_array(name: str, values: Array, dtype: str) -> None:
    if values.ndim != 1 or _name(values) != dtype:
        raise ValueError(
            f"{name}: {values.dtype} of shape {list(values.shape)}; must be {dtype}, one after the other"
        )


def _some(begins: Array | None) -> Array | None:
    """The beginnings of further sequences; None if there are none: equal trajectories have equal arrays."""
    return begins if begins is not None and begins.any() else None


def _starts(lengths: Array) -> NDArray[np.int64]:
    """Index of each row's first element where rows of these lengths lie end to end."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


def _places(chosen: Array, lengths: Array | None, consecutive: bool) -> Any:
    """The places of these rows' elements in rows of such lengths, end to end; a slice if the rows are consecutive."""
    if lengths is None:
        return slice(int(chosen[0]), int(chosen[-1]) + 1) if consecutive else chosen
    starts, counts = _starts(lengths)[chosen], lengths[chosen]
    if consecutive:
        return slice(int(starts[0]), int(starts[-1] + counts[-1]))
    return np.repeat(starts - _starts(counts), counts) + np.arange(int(counts.sum(dtype=np.int64)))


def _described(columns: Columns, name: str) -> str:
    if name not in columns.columns:
        return "missing"
    kind, values = columns.columns[name]
    return f"{_name(values)} per {_EACH[kind]}"


def _little(values: Array) -> Array:
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


Named = list[tuple[str, Kind, str]]
"""Name, kind and type of each array."""


def _header(sizes: Sequence[int], named: Named) -> bytes:
    """Length of the header, the header, and zeros up to where the first array is aligned."""
    header = json.dumps([list(sizes), [list(each) for each in named]], separators=(",", ":")).encode()
    header = struct.pack("<I", len(header)) + header
    return header + bytes(-len(header) % _ALIGNED)


@dataclass(frozen=True, slots=True)
class _Header:
    """The first bytes of packed columns."""

    sizes: Mapping[Kind, int]
    """B, N and M."""
    named: Named
    """The arrays in their order."""
    end: int
    """Place of the first array."""

    @classmethod
    def read(cls, data: bytes, field: str) -> "_Header":
        """Reads it; InvalidArgument unless it is exactly as `pack` writes it, for that many bytes."""
        length = struct.unpack_from("<I", data)[0] if len(data) >= 4 else 0
        if not 0 < length <= min(_LONGEST_HEADER, len(data) - 4):
            raise InvalidArgument(f"{field}: {len(data)} bytes that do not begin with a header of packed columns")
        try:
            sizes, raw = json.loads(data[4 : 4 + length])
            rows, tokens, sampled = (_count(size) for size in sizes)
            named: Named = [(_text(name), _text(kind), _text(dtype)) for name, kind, dtype in raw]  # type: ignore[misc]
        except (ValueError, TypeError, RecursionError) as error:
            # JSON's own words give lines, columns and codecs, which say nothing here.
            told = "it is not JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
            raise InvalidArgument(f"{field}: its header cannot be read: {told}") from None
        for name, kind, dtype in named:
            if kind not in _EACH or dtype not in DTYPES:
                raise InvalidArgument(f"{field}.{name}: {dtype} per {kind}; must be one of {', '.join(DTYPES)}")
        names = [name for name, _, _ in named]
        structure = {("ids", "token", "int32"), ("lengths", "row", "int32"), ("sampled", "token", "bool")}
        if len(set(names)) != len(names) or not structure <= set(named):
            raise InvalidArgument(
                f"{field}: its header names {names[:20]}; {', '.join(STRUCTURE)} must be among them"
            )
        if BEGINS in names and (BEGINS, "token", "bool") not in named:
            raise InvalidArgument(f"{field}.{BEGINS}: must be bool per token")
        header = _header((rows, tokens, sampled), sorted(named, key=_place))
        if data[: len(header)] != header:
            raise InvalidArgument(f"{field}: its header is not as it is packed")
        self = cls({"row": rows, "token": tokens, "sampled": sampled}, named, len(header))
        end = self.end + sum(self.sizes[kind] * np.dtype(dtype).itemsize for _, kind, dtype in named)
        if len(data) != end:
            raise InvalidArgument(f"{field}: {len(data)} bytes, but its header says {end}")
        return self

    def check(self, schema: Schema, field: str) -> None:
        """InvalidArgument, which names the column, unless the arrays are those of the schema."""
        there = {name: (kind, dtype) for name, kind, dtype in self.named if name not in (*STRUCTURE, BEGINS)}
        for name in sorted(there.keys() - schema.keys()):
            raise InvalidArgument(f"{field}.{name}: not expected; may be {', '.join(sorted(schema)) or 'none'}")
        for name, its in schema.items():
            wanted = f"must be {its.dtype} per {_EACH[its.kind]}"
            if name not in there and not its.optional:
                raise InvalidArgument(f"{field}.{name}: missing; {wanted}")
            if name in there and there[name] != (its.kind, its.dtype):
                kind, dtype = there[name]
                raise InvalidArgument(f"{field}.{name}: is {dtype} per {_EACH[kind]}; {wanted}")


def _place(array: tuple[str, Kind, str]) -> tuple[int, str]:
    """Order of arrays: from the widest numbers to the narrowest, so that each begins at a multiple of its width."""
    name, _, dtype = array
    return -np.dtype(dtype).itemsize, name


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r} is not a number of elements")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is not a name")
    return value


def _array(data: bytes, at: int, size: int, dtype: str, field: str) -> tuple[Array, int]:
    """The array at this place, and the place after it."""
    end = at + size * np.dtype(dtype).itemsize
    if dtype == "bool":
        raw = np.frombuffer(data, np.uint8, size, at)
        if (wrong := raw > 1).any():
            raise InvalidArgument(f"{field}: byte {int(np.argmax(wrong))} is {raw[np.argmax(wrong)]}; must be 0 or 1")
        return raw.view(np.bool_), end
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), size, at).astype(dtype, copy=False)
    if dtype == "float32" and not np.isfinite(values).all():
        place = int(np.argmin(np.isfinite(values)))
        raise InvalidArgument(f"{field}[{place}] is {float(values[place])}; must be finite")
    return values, end
