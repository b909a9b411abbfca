"""Loading into vLLM's layers, broken off at every point: with vLLM's own machinery, and no engine around it."""

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from quartet.seams import vllm
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.buckets import Buckets
from quartet.weight_transfer.pieces import Pieces, cut
from services.rollout.vllm import destinations
from services.rollout.vllm.loading import _sharing_nothing
from services.rollout.vllm.transfer import JoiningInfo, QuartetWeightTransferEngine, WorkerExtension

CPU = torch.device("cpu")
LAYERS, SHARDS, WIDTH = 3, "qkv", 4


class Fused(nn.Linear):
    """A weight that is loaded in three parts, as vLLM's attention layers have it, and a bias. (vLLM looks for an
    argument `param` by its name.)"""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH * len(SHARDS))
        self.weight.weight_loader = self._load  # type: ignore[assignment]

    def _load(self, param: torch.Tensor, loaded_weight: torch.Tensor, shard: str) -> None:
        start = SHARDS.index(shard) * WIDTH
        param.data[start : start + WIDTH].copy_(loaded_weight)


class Model(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fused() for _ in range(LAYERS))
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())  # at the beginning, as vLLM's models do
        for name, tensor in weights:
            layer, _, part = name.rpartition(".")
            if part == "bias":
                parameter = parameters[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            else:
                parameter = parameters[f"{layer}.weight"]
                parameter.weight_loader(parameter, tensor, part)  # type: ignore[attr-defined, operator]


def fresh_weights() -> dict[str, torch.Tensor]:
    """Random ones, as they are pushed: by parts."""
    shapes = dict.fromkeys(SHARDS, (WIDTH, WIDTH)) | {"bias": (WIDTH * len(SHARDS),)}
    return {f"layers.{i}.{part}": torch.randn(shape) for i in range(LAYERS) for part, shape in shapes.items()}


def fused(weights: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """The weights that the model has to hold then."""
    whole = {f"layers.{i}.weight": [weights[f"layers.{i}.{part}"] for part in SHARDS] for i in range(LAYERS)}
    biases = {name: tensor for name, tensor in weights.items() if name.endswith("bias")}
    return {name: torch.cat(parts).tolist() for name, parts in whole.items()} | {
        name: tensor.tolist() for name, tensor in biases.items()
    }


class Breaking:
    """A receiver that has weights, and fails before one of its buckets when it is told to."""

    def __init__(self, bucket_bytes: int) -> None:
        self.sent = fresh_weights()
        self.manifest = Manifest.of(self.sent, bucket_bytes)
        self.breaks_at = -1
        self.asked: list[Pieces | None] = []
        self.room: list[Pieces | None] = []

    def join(self, joining: Any) -> None:
        """Does nothing: the weights are here."""

    def receive(self, manifest: Manifest, pieces: Pieces | None = None) -> str:
        self.asked.append(pieces)
        return "sum"

    def make_room(self, manifest: Manifest, pieces: Pieces | None = None) -> None:
        assert manifest == self.manifest
        self.room.append(pieces)

    def buckets(self) -> Iterator[tuple[range, torch.Tensor]]:
        filled = Buckets(self.manifest)
        list(filled.fill(self.sent.items()))
        for number, bucket in enumerate(filled.ranges):
            if number == self.breaks_at:
                raise RuntimeError("connection reset")
            yield bucket, filled[number]

    def weights(self, pieces: Pieces) -> Any:
        return cut(self.manifest, self.buckets(), pieces)

    def check(self) -> None:
        """Does nothing: no sender writes here."""

    def close(self) -> None:
        """Does nothing: the weights stay here."""


class Worker(WorkerExtension):
    """The part of vLLM's worker that matters here: its flag for an active update."""

    def __init__(self, bucket_bytes: int = 64) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        self.model = Model()
        record_metadata_for_reloading(self.model)
        hf_config = SimpleNamespace(tie_word_embeddings=False)
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0, world_size=1),
            model_config=SimpleNamespace(hf_config=hf_config, dtype=torch.float32),
        )
        engine = QuartetWeightTransferEngine(None, vllm_config, CPU, self.model)
        self.receiver = Breaking(bucket_bytes)
        engine._receiver, engine._backend = self.receiver, "gloo"  # type: ignore[assignment]
        self.weight_transfer_engine = engine
        self._weight_update_active = False

    def push(self, *, pieces: bool = False) -> None:
        """Updates as vLLM's GPUWorker does, and as VLLMEngine: an update that failed stays open."""
        manifest, engine = self.receiver.manifest, self.weight_transfer_engine
        engine.start_weight_update()
        self._weight_update_active = True
        fields = {name: list(getattr(manifest, name)) for name in ("names", "dtypes", "shapes")}
        engine.update_weights({**fields, "bucket_bytes": manifest.bucket_bytes, "pieces": pieces})
        self._raise_failure()
        engine.finish_weight_update()
        self._weight_update_active = False
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Asks for the outcome."""
        failure, _ = self.push_outcome()
        if failure:
            raise RuntimeError(failure)

    def state(self) -> dict[str, list[Any]]:
        return {name: parameter.tolist() for name, parameter in self.model.named_parameters()}


CASES = [(size, point) for size in (64, 128) for point in range(1, len(list(Breaking(size).manifest.buckets())))]
"""A bucket is a part of a weight, or two. The points are between layers, within them, and within their weights."""


@pytest.mark.parametrize("before", [0, 1], ids=["layer by layer", "straight"])
@pytest.mark.parametrize(("bucket_bytes", "point"), CASES)
def test_after_a_push_that_broke_off_while_loading_another_one_mends_it(
    bucket_bytes: int, point: int, before: int
) -> None:
    """The first push goes layer by layer, and those after a whole one straight into place."""
    worker = Worker(bucket_bytes)
    for _ in range(before):
        worker.push()
    memory = {name: parameter.data_ptr() for name, parameter in worker.model.named_parameters()}
    worker.receiver.breaks_at = point
    with pytest.raises(RuntimeError, match="connection reset"):
        worker.push()
    # Half of the weights are loaded.
    assert not worker.abort_weight_update()
    worker.receiver.breaks_at, worker.receiver.sent = -1, fresh_weights()
    worker.push()
    assert worker.state() == fused(worker.receiver.sent)
    assert worker.abort_weight_update()
    # Graphs and kernels hold on to it.
    assert {name: parameter.data_ptr() for name, parameter in worker.model.named_parameters()} == memory


def opens(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Pushes new weights; True if the model's layers were opened for them."""
    open_layers = Mock(side_effect=vllm.open_layers)
    weights = fresh_weights()
    worker.receiver.sent = {name: weights[name] for name in worker.receiver.manifest.names}
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "open_layers", open_layers)
        worker.push()
    assert worker.state() == fused(worker.receiver.sent)
    return open_layers.called


def test_pushes_go_straight_until_their_layout_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    assert [opens(worker, monkeypatch) for _ in range(3)] == [True, False, False]
    manifest, own = worker.receiver.manifest, asdict(worker.receiver.manifest)
    assert worker.knows_pieces(own)
    backwards = Manifest(manifest.names[::-1], manifest.dtypes[::-1], manifest.shapes[::-1], 128)
    worker.receiver.manifest = backwards
    assert not worker.knows_pieces(asdict(backwards))
    assert [opens(worker, monkeypatch) for _ in range(2)] == [True, False]
    assert not worker.knows_pieces(own)


def test_only_of_weights_that_are_copied_straight_pieces_are_known_and_asked_for() -> None:
    """Then no memory is kept for all of them."""
    worker = Worker()
    fields, receiver = asdict(worker.receiver.manifest), worker.receiver
    assert not worker.knows_pieces(fields)
    worker.push()
    assert worker.knows_pieces(fields)
    for pieces in (True, False):
        worker.make_room(fields, pieces)
    worker.push(pieces=True)
    worker.push()
    first, second, third = receiver.asked
    assert (first, third) == (None, None)
    assert second is not None
    assert receiver.room == [second, None]
    assert {name: len(pieces) for name, pieces in second.items()} == dict.fromkeys(receiver.sent, 1)
    assert worker.state() == fused(receiver.sent)


def test_weights_that_are_processed_are_loaded_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(QuantizeMethodBase):
        """Stands for a kernel that wants its weights in another form."""

        create_weights = apply = None  # type: ignore[assignment]

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.weight.data = layer.weight.data + 0  # type: ignore[operator, union-attr]

    worker = Worker()
    worker.model.layers[1].quant_method = Doubled()  # type: ignore[assignment]
    assert [opens(worker, monkeypatch) for _ in range(3)] == [True, True, True]
    assert not worker.knows_pieces(asdict(worker.receiver.manifest))


def test_a_model_with_a_packed_layer_is_loaded_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    worker.model.layers[0].cpu_linear = object()  # type: ignore[assignment]
    worker.model.layers[0].quant_method = SimpleNamespace(process_weights_after_loading=lambda _: None)  # type: ignore[assignment]
    assert [opens(worker, monkeypatch) for _ in range(3)] == [True, True, True]


def test_places_where_other_weights_are_found_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner wrote others meanwhile, or a copy was not understood."""
    worker = Worker()
    with monkeypatch.context() as patch:
        patch.setattr(destinations.Destinations, "hold", lambda *_: False)
        assert opens(worker, monkeypatch)
    assert [opens(worker, monkeypatch) for _ in range(2)] == [True, False]


def test_a_push_without_all_weights_ends_with_a_mixture_that_is_known() -> None:
    worker = Worker()
    worker.push()
    buckets = worker.receiver.buckets
    worker.receiver.buckets = lambda: itertools.islice(buckets(), 2)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="weights were not sent, such as layers"):
        worker.push()
    assert not worker.abort_weight_update()
    worker.receiver.buckets = buckets  # type: ignore[method-assign]
    worker.push()
    assert worker.abort_weight_update()
    assert worker.state() == fused(worker.receiver.sent)


@pytest.mark.parametrize("before", [0, 1], ids=["layer by layer", "straight"])
def test_the_weights_are_checked_after_the_last_layer_is_closed(before: int) -> None:
    """Layers with padding are copied only then, and the learner may have written other weights since the loading."""
    worker = Worker()
    for _ in range(before):
        worker.push()

    def overwritten() -> None:
        assert not any(get_layerwise_info(layer).can_load() for layer in worker.model.modules())
        raise RuntimeError("the learner wrote other weights while these were loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.receiver, "check", overwritten)
        with pytest.raises(RuntimeError, match="wrote other weights"):
            worker.push()
    assert not worker.abort_weight_update()
    worker.receiver.sent = fresh_weights()
    worker.push()
    assert worker.abort_weight_update()
    assert worker.state() == fused(worker.receiver.sent)


def test_a_push_that_broke_off_before_loading_leaves_the_weights_as_they_were() -> None:
    worker = Worker()
    before = worker.state()
    worker.weight_transfer_engine.start_weight_update()
    assert worker.abort_weight_update()
    assert worker.state() == before


def test_a_worker_takes_the_place_of_its_rank_and_keeps_its_receiver_from_membership_to_membership() -> None:
    worker = Worker()
    engine = worker.weight_transfer_engine
    joined: list[JoiningInfo] = []
    left: list[None] = []
    engine.parallel_config.rank, engine.parallel_config.world_size = 2, 4
    worker.receiver.join = joined.append  # type: ignore[assignment, method-assign]
    worker.receiver.close = lambda: left.append(None)  # type: ignore[method-assign]
    info: dict[str, Any] = {
        "backend": "gloo",
        "senders": [["h", 1]],
        "rank": 3,
        "world_size": 9,
        "membership": 4,
        "stall_s": 1.0,
    }
    for _ in range(2):
        engine.init_transfer_engine(JoiningInfo(**info))
    given = [(joining.rank, joining.worker, joining.workers, joining.membership) for joining in joined]
    assert given == [(5, 2, 4, 4)] * 2
    assert engine._receiver is worker.receiver
    assert not left  # to join leaves the group before, in the time that there is for it
    engine.init_transfer_engine(JoiningInfo(**info | {"backend": "ipc", "senders": [["h", 7]]}))
    assert engine._receiver is not worker.receiver
    assert len(left) == 1


def test_a_worker_says_why_it_did_not_join_and_does_not_raise() -> None:
    """vLLM would take what it answers to this call for the answer to the next."""
    worker = Worker()
    worker.weight_transfer_engine.init_transfer_engine(JoiningInfo("unknown", [["127.0.0.1", 1]], 1, 2, 1, 1.0))
    failure, _ = worker.push_outcome()
    assert failure.startswith("ValueError: weights.backend: 'unknown' is not one of gloo, nccl")
    worker.weight_transfer_engine.init_transfer_engine(JoiningInfo("ipc", [["127.0.0.1", 1]], 1, 2, 1, 1.0))
    assert worker.push_outcome() == ("", "")


def test_a_worker_on_a_cpu_names_its_process_and_no_gpu() -> None:
    worker = Worker()
    worker.model_runner = SimpleNamespace()
    assert worker.prepare_worker() == (os.getpid(), "")


def test_layers_that_share_nothing_are_named_though_their_weights_were_freed() -> None:
    """vLLM's CPU build frees the weights of which it has packed copies."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("got", "stale", "head", "embeddings")})
    model["head"].weight = model["embeddings"].weight
    for name in ("got", "stale"):
        model[name].weight = nn.Parameter(torch.empty(0))
    assert _sharing_nothing(model, ["stale", "head"]) == ["stale"]
