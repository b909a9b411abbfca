"""Learns where a model keeps its weights by watching one load, so that later ones are copied straight there.

vLLM opens each layer, loads it elsewhere, processes it and copies it into place, which for small models takes longer
than all else of a push. Where nothing but copies leads from the weights that are sent to the model's memory, as in
half precision on a GPU, the same copies can be made at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quartet.seams.torch import Operators, storage_of
from quartet.weight_transfer.pieces import Piece, Pieces

CONSTANTS = {"fill_", "zero_"}
"""Operators that write what no weight has a part in, such as zeros in the rows of a padded vocabulary."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A piece of a weight, and the piece of a memory to which it was copied."""

    name: str
    source: Piece
    target: Piece


@dataclass(frozen=True, slots=True)
class Destinations:
    """The copies that bring new weights into a model."""

    copies: Mapping[str, Sequence[tuple[Piece, Tensor]]]
    """Name of a weight -> pieces of it, each with its place in the model's memory."""

    @property
    def pieces(self) -> Pieces:
        """The pieces of weights that are copied."""
        return {name: [piece for piece, _ in copies] for name, copies in self.copies.items()}

    def fill(self, weights: Iterable[tuple[str, Sequence[Tensor]]]) -> None:
        """Copies the pieces of each weight into place, from any memory. RuntimeError if one is missing: the model is
        then a mixture."""
        missing = set(self.copies)
        for name, pieces in weights:
            for piece, (_, place) in zip(pieces, self.copies.get(name, ()), strict=True):
                place.copy_(near(piece, place), non_blocking=True)
            missing.discard(name)
        if missing:
            raise RuntimeError(f"{len(missing)} weights were not sent, such as {min(missing)}")

    def hold(self, weights: Iterable[tuple[str, Sequence[Tensor]]]) -> bool:
        """True if the model holds these pieces of each weight, number by number."""
        return all(
            torch.equal(near(piece, place).to(place.device, place.dtype), place)
            for name, pieces in weights
            for piece, (_, place) in zip(pieces, self.copies.get(name, ()), strict=True)
        )


def _ends(piece: Piece) -> tuple[int, int]:
    """The first number of a piece, and the one after its last."""
    if 0 in piece.sizes:
        return piece.offset, piece.offset
    last = sum((size - 1) * stride for size, stride in zip(piece.sizes, piece.strides, strict=True))
    return piece.offset, piece.offset + last + 1


def near(piece: Tensor, place: Tensor) -> Tensor:
    """The piece, or a copy of it on the device of its place, if it is elsewhere and its numbers are scattered or of
    another dtype. All that lies between them is copied too, as the host would take longer to gather or convert them.
    """
    alike = piece.is_contiguous() and piece.dtype == place.dtype
    if piece.device == place.device or alike or not piece.numel():
        return piece
    begin, end = _ends(Piece.of(piece))
    between = piece.as_strided((end - begin,), (1,)).to(place.device, non_blocking=True)
    return between.as_strided(piece.shape, piece.stride())


class Watch(Operators):
    """Follows weights through the copies of a load, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.problem = ""
        """The first operator that computed something from a weight; empty if there was none."""
        self._weights: dict[int, list[tuple[range, str]]] = {}
        """Storage -> the bytes of each weight in it."""
        self._copied: dict[int, list[Copy]] = {}
        """Storage -> the copies of weights to it."""
        self._begun: set[tuple[str, Piece]] = set()
        """Names and pieces of weights that were copied anywhere."""

    def named(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights, which are followed from now on."""
        for name, weight in weights:
            begin = weight.storage_offset() * weight.element_size()
            span = range(begin, begin + weight.numel() * weight.element_size())
            self._weights.setdefault(storage_of(weight), []).append((span, name))
            yield name, weight

    def destinations(self, model: torch.nn.Module) -> Destinations | None:
        """The copies into the model's memory. None if something else leads there or nothing does, or if a weight was
        copied that is not there: then the model keeps it in another form, which torch may not have shown."""
        copies: dict[str, list[tuple[Piece, Tensor]]] = {}
        memories = {storage_of(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        for storage, tensor in memories.items():
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
            for copy in dict.fromkeys(self._copied.get(storage, ())):
                copies.setdefault(copy.name, []).append((copy.source, copy.target.within(whole)))
        arrived = {(name, piece) for name, found in copies.items() for piece, _ in found}
        return Destinations(copies) if copies and arrived == self._begun and not self.problem else None

    def look(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Follows a copy. Another operator that is given numbers of a weight is a problem, as is a constant in their
        place: it would be the same in a weight of zeros, but not in the next."""
        if name == "copy_":
            self._follow(*given)
        elif name in CONSTANTS and not any(map(self._knows, given[1:])):
            if self._has_numbers_in(given[0]):
                self.problem = self.problem or f"{name} of {list(given[0].shape)}"
        else:
            if any(map(self._knows, given)):
                self.problem = self.problem or name
            for tensor in made:  # perhaps where something was that is gone
                self._copied.pop(storage_of(tensor), None)
                self._weights.pop(storage_of(tensor), None)

    def _follow(self, target: Tensor, source: Tensor) -> None:
        if target.is_meta:
            return  # where vLLM counts the numbers of a layer
        found = self._from_weight(target, source) or self._from_memory(target, source)
        if not found and (self._knows(source) or self._knows(target)):
            self.problem = self.problem or f"a copy to {list(target.shape)} from {list(source.shape)}"
        self._copied.setdefault(storage_of(target), []).extend(found)

    def _from_weight(self, target: Tensor, source: Tensor) -> list[Copy]:
        if (found := self._weight(source)) is None or source.shape != target.shape:
            return []
        span, name = found
        piece = Piece.of(source, span.start // source.element_size())
        self._begun.add((name, piece))
        return [Copy(name, piece, Piece.of(target))]

    def _weight(self, tensor: Tensor) -> tuple[range, str] | None:
        """The weight of which a tensor is a view: its bytes in the storage and its name."""
        begin = tensor.storage_offset() * tensor.element_size()
        return next((found for found in self._weights.get(storage_of(tensor), ()) if begin in found[0]), None)

    def _from_memory(self, target: Tensor, source: Tensor) -> list[Copy]:
        """The copies to another memory, if that is copied as a whole to one that is laid out like it."""
        whole = source.numel() * source.element_size() == source.untyped_storage().nbytes()
        alike = (source.dtype, source.shape, source.stride()) == (target.dtype, target.shape, target.stride())
        if not (whole and alike):
            return []
        return [
            replace(copy, target=replace(copy.target, offset=copy.target.offset + target.storage_offset()))
            for copy in self._copied.get(storage_of(source), ())
        ]

    def _has_numbers_in(self, tensor: Tensor) -> bool:
        """True if numbers of a weight lie between the first and the last one of a tensor."""
        begin, end = _ends(Piece.of(tensor))
        copied = (_ends(copy.target) for copy in self._copied.get(storage_of(tensor), ()))
        return bool(self._weight(tensor)) or any(first < end and begin < last for first, last in copied)

    def _knows(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and bool(self._copied.get(storage_of(tensor)) or self._weight(tensor))
