"""The critic deployment, which only translates between protobuf and the critic's model.

It has one replica, since values and training share its weights. Import path: `services.critic.replica:build`.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from ray import serve

from protos import common_pb2
from protos import critic_pb2 as pb
from quartet.columns import Columns, Schema
from quartet.serving.admission import MOST_ONGOING, Admission
from quartet.serving.batcher import Batcher
from quartet.serving.health import HealthMixin
from quartet.serving.replica_process import prepare_replica
from quartet.serving.servicer import translated
from quartet.serving.share import Share
from quartet.serving.token_call import Asked, TokenCall
from quartet.wire.codec import Floats, pack_floats, pack_longs, pack_metrics
from quartet.wire.errors import InvalidArgument
from services.critic.client import BATCH
from services.critic.config import CriticConfig


class ValuesCall(TokenCall[Asked]):
    """Trajectories, and the critic's step at each pass, since it may be trained between two passes."""

    def __init__(self, trajectories: Columns, step: Callable[[], int]) -> None:
        """`step` returns the critic's step; it raises if the critic is not in a state that the caller accepts."""
        super().__init__(trajectories, lambda trajectory: trajectory)
        self._step = step
        self.steps = np.zeros(len(trajectories), np.int64)
        """[B] the step whose weights computed the values of each trajectory."""

    def items(self, rows: Sequence[int]) -> list[Asked]:
        """The model's inputs for these rows; raises the error of `step`."""
        self.steps[list(rows)] = self._step()
        return super().items(rows)


@serve.deployment(
    name="Critic",
    max_ongoing_requests=MOST_ONGOING,
    # Three checks in a row have to fail, and there is no other replica meanwhile. The model computes in other
    # processes, so that this one answers soon; but not while Serve's proxy stands still, which therefore has to be
    # replaced before (orchestrator/deployment/head.py).
    health_check_period_s=1,
    health_check_timeout_s=3,
    graceful_shutdown_timeout_s=10,
)
class Critic(HealthMixin):
    """One replica, one value model."""

    async def __init__(self, config: CriticConfig, start_ranks: Any = None) -> None:  # type: ignore[misc]  # awaited
        """Starts the model. `start_ranks` takes the place of `ranks_of`, for ranks that are emulated."""
        # Imported here because Serve builds the application in a process that then need not load torch.
        from quartet.models.loading import load_tokenizer
        from quartet.wire.identity import describe_model
        from services.critic.learner import CriticModel

        prepare_replica()
        self._config = config
        self._critic = CriticModel(config, serve.get_replica_context().app_name, start_ranks)
        self._admission, self._train_admission = Admission(config.limits), Admission(config.train_limits)
        self._batcher: Batcher[Asked, Floats] = Batcher(
            self._critic.values,
            batch_tokens=config.micro_batch_tokens * config.ranks,
            batch_s=config.limits.batch_s,
            turn=self._critic.turn,
        )
        vocab_size, max_length = await self._critic.start()
        self._model = describe_model(
            config.model,
            load_tokenizer(config.model),
            vocab_size=vocab_size,
            max_length=max_length,
            dtype=config.dtype,
        )

    def __del__(self) -> None:
        critic = getattr(self, "_critic", None)
        if critic is not None:
            critic.stop()

    async def check_health(self) -> None:
        """Raises if calls hang, or if ranks that should have taken the place of lost ones did not start; Serve then
        replaces the replica."""
        self._critic.check()
        self._batcher.check()

    @translated
    async def Claim(self, request: pb.ClaimRequest) -> pb.ClaimResponse:
        """Gives the critic to the run that holds this lease, or renews the lease."""
        self._critic.expect_ranks()  # a run begins with a critic that works, or waits for one
        self._critic.fence.claim(request.lease, request.claim)
        return pb.ClaimResponse(held=self._critic.fence.held())

    @translated
    async def Adopt(self, request: pb.AdoptRequest) -> pb.AdoptResponse:
        """Takes the critic as it is into the timeline of the lease."""
        await self._critic.adopt(request.lease, request.last_step)
        return pb.AdoptResponse()

    @translated
    async def Values(self, request: pb.ValuesRequest, share: Share) -> pb.ValuesResponse:
        """Computes the values of trajectories by the expected step or a later one, and says by which."""
        data = request.trajectories
        rows, tokens = Columns.measure(data, "trajectories")
        step = partial(self._critic.expect, request.lease, request.min_step if request.HasField("min_step") else None)
        with self._admission.admitted(share, rows, tokens, "trajectories"):
            step()
            call = ValuesCall(self._read(data, {}, "trajectories"), step)
            await self._batcher.submit(share, call)
        return pb.ValuesResponse(values=pack_floats(call.out), steps=pack_longs(call.steps))

    @translated
    async def Stage(self, request: pb.StageRequest, share: Share) -> pb.StageResponse:
        """Holds a part of a batch until the Train that names it."""
        _check_least(request, step=1, row=0)
        data = request.batch
        with self._train_admission.admitted(share, *Columns.measure(data, "batch"), "batch"):
            part = await asyncio.to_thread(self._batch, data)
            self._critic.stage(request.lease, request.step, request.row, part)
        return pb.StageResponse()

    @translated
    async def Train(self, request: pb.TrainRequest, share: Share) -> pb.TrainResponse:
        """Trains on one batch, at most once per step id."""
        _check_least(request, staged=0)
        data = request.batch
        if request.staged and data:
            raise InvalidArgument("batch: stage it too, or send it without `staged`")
        parts = self._critic.staged(request.lease, request.step, request.staged) if request.staged else []
        staged = request.staged, sum(part.tokens for part in parts)
        with self._train_admission.admitted(share, *(staged if parts else Columns.measure(data, "batch")), "batch"):
            parts = parts or [await asyncio.to_thread(self._batch, data)]
            _check_least(request, step=1, epochs=1, minibatch_size=1, seed=0)
            metrics = await self._critic.train(
                request.lease,
                request.step,
                parts,
                int(request.last_step) if request.HasField("last_step") else None,
                epochs=request.epochs,
                minibatch_size=request.minibatch_size,
                seed=request.seed,
            )
        return pb.TrainResponse(metrics=pack_metrics(metrics))

    @translated
    async def Save(self, request: pb.SaveRequest) -> pb.SaveResponse:
        """Writes the model to a folder under the root."""
        await self._critic.save(request.lease, request.name)
        return pb.SaveResponse(name=request.name)

    @translated
    async def TakeCheckpoint(self, request: pb.CheckpointRequest) -> pb.CheckpointResponse:
        """Copies the state, or writes it at once."""
        copies = not request.without_copies
        await self._critic.take_checkpoint(request.lease, request.name, request.last_step, copies)
        return pb.CheckpointResponse(last_step=request.last_step)  # another may have begun since

    @translated
    async def WriteCheckpoint(self, request: pb.CheckpointRequest) -> pb.CheckpointResponse:
        """Writes the copied state to disk."""
        await self._critic.write_checkpoint(request.lease, request.name)
        return pb.CheckpointResponse(last_step=self._critic.last_step)

    @translated
    async def RestoreCheckpoint(self, request: pb.CheckpointRequest) -> pb.CheckpointResponse:
        """Resumes from a checkpoint under the root."""
        return pb.CheckpointResponse(last_step=await self._critic.restore_checkpoint(request.lease, request.name))

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.CriticInfo:
        """Describes the model, the last step trained and the lease, also while ranks start."""
        return pb.CriticInfo(
            model=self._model,
            last_step=self._critic.last_step,
            initialised_from=self._config.model,
            held=self._critic.fence.held(),
            timeline=self._critic.timeline,
        )

    def _read(self, data: bytes, schema: Schema, field: str) -> Columns:
        model = self._model
        return Columns.received(data, schema, vocab_size=model.vocab_size, max_length=model.max_length, field=field)

    def _batch(self, data: bytes) -> Columns:
        """A part of a batch, with the mask of the tokens that are trained on, which a caller may leave out."""
        batch = self._read(data, BATCH, "batch")
        return batch if "trained" in batch else batch.with_sampled(trained=np.ones(batch.size("sampled"), np.bool_))


def _check_least(request: pb.StageRequest | pb.TrainRequest, **least: int) -> None:
    """Raises InvalidArgument if a field of the request is less than given here."""
    for field, number in least.items():
        if getattr(request, field) < number:
            raise InvalidArgument(f"{field}: {getattr(request, field)}; must be at least {number}")


def build(args: dict[str, Any]) -> serve.Application:
    """Builds the application from the `args:` of the YAML file."""
    return Critic.bind(CriticConfig.parse(args, "critic.args"))  # type: ignore[attr-defined, no-any-return]
