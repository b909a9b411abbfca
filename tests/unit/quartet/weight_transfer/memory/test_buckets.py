"""Buckets of weights that are on a device: packed there, pinned here."""

import gc
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory import buckets
from quartet.weight_transfer.memory.buckets import DIGEST_CHUNK, Buckets, digest
from quartet.weight_transfer.memory.pinning import pin
from tests.unit.fake_cuda import FakeGpu

CPU = torch.device("cpu")
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.full((9,), 2.0)}


class Copies(TorchDispatchMode):
    """Notes the bytes of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("sender", "senders", "sizes"), [(0, 1, [24, 6, 30, 36, 36]), (1, 2, [36, 36])])
def test_a_bucket_is_packed_on_its_device_and_comes_in_one_copy(sender: int, senders: int, sizes: list[int]) -> None:
    manifest = Manifest.of(WEIGHTS, bucket_bytes=32)  # a with b, and c
    packed, plain = Buckets(manifest, sender, senders, device=CPU), Buckets(manifest, sender, senders)
    with Copies() as copies:
        on_device = dict(packed.fill(WEIGHTS.items()))
    assert list(on_device) == packed.numbers
    assert copies.sizes == sizes
    in_memory = dict(plain.fill(WEIGHTS.items()))
    assert list(in_memory) == plain.numbers
    for number in packed.numbers:
        assert torch.equal(packed[number], plain[number])
        assert torch.equal(on_device[number], plain[number])
        assert on_device[number].data_ptr() != packed[number].data_ptr()
        assert in_memory[number].data_ptr() == plain[number].data_ptr()


def test_memory_is_pinned_for_as_long_as_its_owner_lives(tmp_path: Path) -> None:
    gpu, memory = FakeGpu(tmp_path), torch.zeros(100, dtype=torch.uint8)
    owner = Buckets(Manifest.of({}, 1))
    assert pin(memory, owner, gpu.library)
    assert gpu.pinned == {memory.data_ptr(): (100, 0)}
    del owner
    gc.collect()
    assert gpu.pinned == {}


def test_where_memory_may_not_be_pinned_it_is_used_as_it_is(logged: list[str], tmp_path: Path) -> None:
    gpu, memory = FakeGpu(tmp_path), torch.zeros(3 << 20, dtype=torch.uint8)
    gpu.refused = 2
    assert not pin(memory, gpu, gpu.library)
    assert logged == ["3 MiB of host memory are not pinned: cudaHostRegister failed: CUDA error 2"]
    assert gpu.last_error == 0  # else torch's next kernel would raise it


def test_without_cudas_runtime_nothing_is_pinned(logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)  # as in a torch for CPUs alone
    owner = Buckets(Manifest.of({}, 1))
    assert not pin(torch.zeros(8, dtype=torch.uint8), owner)
    [line] = logged
    assert line.startswith("0 MiB of host memory are not pinned: CUDA's runtime is missing: libcudart")


def test_a_digest_is_made_of_chunks_and_shows_a_change_in_each() -> None:
    data = torch.randint(0, 256, (2 * DIGEST_CHUNK + 5,), dtype=torch.uint8)
    whole, raw = digest(data), data.numpy().tobytes()
    cut = [xxhash.xxh3_128_digest(raw[start : start + DIGEST_CHUNK]) for start in range(0, len(raw), DIGEST_CHUNK)]
    assert len(cut) == 3
    assert whole == xxhash.xxh3_128_digest(b"".join(cut))
    digests = {whole}
    for place in (0, DIGEST_CHUNK, 2 * DIGEST_CHUNK + 4):
        data[place] ^= 1
        digests.add(digest(data))
    assert len(digests) == 4
    # Chunks that changed places.
    assert digest(torch.cat((data[DIGEST_CHUNK : 2 * DIGEST_CHUNK], data[:DIGEST_CHUNK]))) != digest(
        data[: 2 * DIGEST_CHUNK]
    )


def test_chunks_are_hashed_by_several_threads_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2)

    def hashed(data: Any) -> bytes:
        if len(data) == DIGEST_CHUNK:
            together.wait(60)
        return bytes(xxhash.xxh3_128_digest(data))

    data = torch.zeros(2 * DIGEST_CHUNK, dtype=torch.uint8)
    expected = digest(data)
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(buckets, "_hashers", lambda process: pool)
        monkeypatch.setattr(buckets, "xxhash", SimpleNamespace(xxh3_128_digest=hashed))
        assert digest(data) == expected


def hash_in_a_fork(data: torch.Tensor, answers: Connection) -> None:
    answers.send(digest(data))


@pytest.mark.processes
def test_a_fork_hashes_with_threads_of_its_own() -> None:
    data = torch.ones(2 * DIGEST_CHUNK, dtype=torch.uint8)
    expected = digest(data)
    mine, theirs = multiprocessing.Pipe()
    # Forked from here, where there are threads already.
    process = multiprocessing.get_context("fork").Process(target=hash_in_a_fork, args=(data, theirs), daemon=True)
    process.start()
    assert mine.poll(60)
    assert mine.recv() == expected
    process.join(10)
