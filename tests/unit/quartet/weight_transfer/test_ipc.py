"""A push through memory that processes share: of the host, or of a GPU, for which files stand in behind CUDA's own C
functions."""

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from quartet.weight_transfer.ipc import SharedBuckets, SharedSender
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.buckets import checksum
from quartet.weight_transfer.memory.device_digest import CHUNK_WORDS, device_digest
from quartet.weight_transfer.memory.device_memory import DeviceMemory, cuda_runtime
from quartet.weight_transfer.receiver import Joining, make_receiver
from quartet.weight_transfer.sender import Sender, make_sender
from tests.fake_device import DEVICE, DOWN, UP, FakeDevice
from tests.forked import FORKED
from tests.unit.fake_cuda import LARGEST, FakeGpu

CPU = torch.device("cpu")
TENSORS = {
    "embed": torch.arange(1000, dtype=torch.float32).view(10, 100),
    "odd": torch.tensor([3], dtype=torch.uint8),
    "half": torch.linspace(0, 1, 33).to(torch.bfloat16),
}
MANIFEST = Manifest.of(TENSORS, bucket_bytes=1024)


backends = pytest.mark.parametrize("backend", ["ipc", "cuda-ipc"])


def joining(backend: str, *numbers: int) -> Joining:
    return Joining(backend, [["", number] for number in numbers], 1, 2, 1, 5.0)


def senders_of(backend: str, count: int, gpu: FakeGpu) -> list[Sender]:
    options = {"host": "127.0.0.1", "stall_s": 5.0, "senders": count, "cuda": gpu.cuda}
    return [make_sender(backend, MANIFEST, sender=number, **options) for number in range(count)]  # type: ignore[arg-type]


def read(backend: str, folder: str, numbers: list[int], answers: Connection) -> None:
    """Another process, with the same GPU."""
    gpu = FakeGpu(Path(folder))
    receiver = make_receiver(backend, CPU, gpu.cuda)
    receiver.join(joining(backend, *numbers))
    checksums = [receiver.receive(MANIFEST), receiver.receive(MANIFEST)]
    values = {name: tensor.tolist() for b, data in receiver.buckets() for name, tensor in MANIFEST.cut(b, data)}
    receiver.check()
    receiver.close()
    answers.send((checksums, values, gpu.calls, gpu.mapped))


@pytest.mark.processes
@backends
@pytest.mark.parametrize("count", [1, 2])
def test_another_process_reads_what_was_loaded(backend: str, count: int, tmp_path: Path) -> None:
    gpu = FakeGpu(tmp_path)
    senders = senders_of(backend, count, gpu)
    for sender in senders:
        sender.load(TENSORS.items(), 1)
    mine, theirs = FORKED.Pipe()
    arguments = (backend, str(tmp_path), [sender.rendezvous() for sender in senders], theirs)
    process = FORKED.Process(target=read, args=arguments, daemon=True)
    process.start()
    assert mine.poll(60)
    checksums, values, calls, left = mine.recv()
    process.join(10)
    sent = checksum({number: digest for sender in senders for number, digest in sender.send(1).items()})
    assert checksums == [sent, sent]
    assert values == {name: tensor.tolist() for name, tensor in TENSORS.items()}
    # A GPU's memory is opened once for both pushes, and given back.
    assert calls == (["open"] * count + ["close"] * count if backend == "cuda-ipc" else [])
    assert left == 0
    for sender in senders:
        sender.close()
    assert gpu.mapped == 0


@backends
@pytest.mark.parametrize(("count", "writing"), [(1, 0), (2, 0), (2, 1)])
def test_a_reader_notices_that_it_is_written_meanwhile(
    backend: str, count: int, writing: int, tmp_path: Path
) -> None:
    """One of several senders may write alone."""
    gpu = FakeGpu(tmp_path)
    senders = senders_of(backend, count, gpu)
    for sender in senders:
        sender.load(TENSORS.items(), 1)
    receiver = make_receiver(backend, CPU, gpu.cuda)
    receiver.join(joining(backend, *(sender.rendezvous() for sender in senders)))
    first = receiver.receive(MANIFEST)
    receiver.check()

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS.items():
            # In the middle of the next push.
            with pytest.raises(RuntimeError, match="is writing other weights already"):
                receiver.receive(MANIFEST)
            yield name, tensor + 1

    senders[writing].load(interrupted(), 2)
    with pytest.raises(RuntimeError, match="wrote other weights while these were loaded"):
        receiver.check()
    assert receiver.receive(MANIFEST) != first
    receiver.check()
    receiver.close()
    for sender in senders:
        sender.close()


@backends
def test_who_joins_another_learner_reads_its_memory_and_not_that_of_the_one_before(
    backend: str, tmp_path: Path
) -> None:
    """A run that goes back to a checkpoint has new ranks; the replicas and the manifest stay."""
    gpu = FakeGpu(tmp_path)
    before, after = (senders_of(backend, 1, gpu)[0] for _ in range(2))
    before.load(TENSORS.items(), 1)
    after.load(((name, tensor + 1) for name, tensor in TENSORS.items()), 1)
    receiver = make_receiver(backend, CPU, gpu.cuda)
    received = []
    for sender in (before, after):
        receiver.join(joining(backend, sender.rendezvous()))
        received.append(receiver.receive(MANIFEST))
        assert received[-1] == checksum(sender.send(1))
    assert received[0] != received[1]
    receiver.close()
    for sender in (before, after):
        sender.close()
    assert gpu.mapped == 0


def test_memory_that_is_gone_or_too_small_is_an_error_and_nothing_stays_open(tmp_path: Path) -> None:
    gpu = FakeGpu(tmp_path)
    with pytest.raises(RuntimeError, match=r"^cudaMalloc failed: CUDA error 2$"):
        DeviceMemory.allocate(LARGEST + 1, CPU, gpu.cuda)
    assert gpu.last_error == 0  # else torch's next kernel would raise it
    senders = [SharedSender.gpu(MANIFEST, CPU, sender=number, senders=2, cuda=gpu.cuda) for number in (0, 1)]
    assert senders[1]._memory is not None
    senders[1]._memory.close()
    receiver = make_receiver("cuda-ipc", CPU, gpu.cuda)
    receiver.join(joining("cuda-ipc", *(sender.rendezvous() for sender in senders)))
    with pytest.raises(RuntimeError, match=r"^cudaIpcOpenMemHandle failed: CUDA error 205$"):
        receiver.receive(MANIFEST)
    assert gpu.last_error == 0
    receiver.close()
    assert gpu.calls.count("open") == 2
    assert gpu.calls.count("close") == 1
    for sender in senders:
        sender.close()
    assert gpu.mapped == 0


@pytest.mark.parametrize(
    ("backend", "down", "up"),
    [("ipc", 1, 1), ("cuda-ipc", 0, 0)],  # copies of all weights, by the sender and by the replica
)
def test_bytes_that_a_push_copies_between_host_and_device(backend: str, down: int, up: int, tmp_path: Path) -> None:
    cuda = FakeGpu(tmp_path).cuda
    with FakeDevice().counting() as device:
        weights = {f"w{i}": torch.full((4,), float(i), device=DEVICE) for i in range(5)}
        manifest, total = Manifest.of(weights, bucket_bytes=32), 5 * 16
        with device.labelled("sender"):
            if backend == "ipc":
                sender = SharedSender.host(manifest, device=DEVICE)
            else:
                sender = SharedSender.gpu(manifest, DEVICE, cuda=cuda)
                device.take(sender._buckets[0])
            sender.load(weights.items(), 1)
        with device.labelled("replica"):
            numbers = [sender.rendezvous()]
            if backend == "ipc":
                shared = SharedBuckets.host(numbers, manifest)
            else:
                shared = SharedBuckets.gpu(numbers, manifest, DEVICE, cuda)
                device.take(shared._opened[0].data)
            assert shared.verify() == checksum(sender.send(1))
            loaded = [
                tensor.tolist()
                for bucket, data in shared.buckets()
                for _, tensor in manifest.cut(bucket, data.to(DEVICE, non_blocking=True))
            ]
        shared.close()
        sender.close()
    assert loaded == [[float(i)] * 4 for i in range(5)]
    expected = {("sender", DOWN): down * total, ("replica", UP): up * total}
    assert device.copied == {key: size for key, size in expected.items() if size}


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (
        lambda: make_receiver("cuda-ipc", CPU),
        lambda: make_sender("cuda-ipc", MANIFEST, host="127.0.0.1", stall_s=1),
    ):
        with pytest.raises(ValueError, match=r"^weights.backend: cuda-ipc, but this process has no GPU$"):
            make()
    monkeypatch.setattr(torch.version, "cuda", None)  # as in a torch for CPUs alone
    with pytest.raises(RuntimeError, match=r"^CUDA's runtime is missing: libcudart"):
        cuda_runtime()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 8 * CHUNK_WORDS + 5])
def test_a_digest_shows_each_changed_byte_and_each_two_that_changed_places(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    whole = device_digest(data)
    assert len(whole) == 16
    assert device_digest(data.clone()) == whole
    for place in {0, size // 2, size - 1} if size else ():
        changed = data.clone()
        changed[place] ^= 128
        assert device_digest(changed) != whole
    if size > 16:
        assert device_digest(data.roll(8)) != whole
    assert device_digest(torch.cat((data, torch.ones(1, dtype=torch.uint8)))) != whole


def test_changes_of_many_words_do_not_cancel_out() -> None:
    """A plain sum would not notice the highest bits of two words, or one more and one less."""
    data = torch.arange(64, dtype=torch.int64)
    digests = {device_digest(data.view(torch.uint8))}
    for first, second in ((-(2**63), -(2**63)), (1, -1), (5, -5)):
        changed = data.clone()
        changed[3] += first
        changed[40] += second
        digests.add(device_digest(changed.view(torch.uint8)))
    assert len(digests) == 4


def test_the_mixing_is_the_one_that_is_written_down() -> None:
    """The same in Python's numbers, without a device that wraps around."""
    mask = 2**64 - 1

    def finalized(word: int, factors: tuple[int, ...]) -> int:
        for factor in factors:
            word = (word ^ (word >> 32)) * factor & mask
        return word ^ (word >> 32)

    sums = [0, 0]
    for place, word in enumerate([7, 2**64 - 1, 0], start=1):
        mixed = finalized((word + place * 0x9E3779B97F4A7C15) & mask, (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))
        sums[0] += mixed
        sums[1] += finalized(mixed, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    data = torch.tensor([7, -1, 0]).view(torch.uint8)
    assert device_digest(data) == b"".join((total & mask).to_bytes(8, "little") for total in sums)
