"""The model behind the critic service: its ranks, the steps they trained, and their checkpoints."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from protos import common_pb2
from quartet.columns import Columns
from quartet.learner.layout import LAYOUT, Layout
from quartet.learner.learner import RankLearner
from quartet.ranks.group import Answer, Arguments, Method, RankFailed, RankGroup, RanksLost
from quartet.serving.runs.lease import Fence
from quartet.serving.runs.timeline import Moment
from quartet.serving.token_call import Asked, joined
from quartet.wire.codec import Floats
from quartet.wire.errors import FailedPrecondition, Unavailable
from services.critic.config import CriticConfig
from services.critic.once import Once
from services.critic.root import Root
from services.critic.staged import StagedBatch, digest
from services.critic.trainer import CriticTrainer

log = logging.getLogger("quartet")

STARTS_OTHERS = "the critic has lost its ranks and starts others"

StartRanks = Callable[[CriticConfig], RankGroup]
"""Makes a critic's ranks, which have no model yet."""


class CriticModel:
    """Drives the critic's ranks. Methods with a lease raise LeaseLost if another is in force.

    A rank that is lost takes the training with it. New ranks then start with the model that this critic first started
    with, in place of all old ones; until they have, and while a checkpoint is being restored, every method that needs
    them raises Unavailable. A run finds the critic off its timeline and restores its last checkpoint.
    """

    def __init__(self, config: CriticConfig, application: str, start_ranks: StartRanks | None = None) -> None:
        """`application` is the critic's name, which tells apart critics that share a root."""
        self._config = config
        self._root = Root(config.root)
        self.fence = Fence(self._root.folder / f".lease-{application}.json")
        self._once: Once[dict[str, float]] = Once()
        self._staged = StagedBatch(config.train_limits)
        self._at = Moment()
        """The moment of the weights. A step that is being trained counts only when it is done."""
        self._start_ranks = start_ranks or ranks_of
        self._ranks = self._start_ranks(config)
        self._taken = self._written = ""
        self._unused = False
        """True while the ranks hold the model as they loaded it, so that a checkpoint can be restored into them."""
        self._restoring = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        """The start of new ranks in place of lost ones."""
        self._failure = ""
        """Reason for which new ranks did not start; empty while none have failed."""
        self._pasts = 0
        """Times that the training up to then was given up."""
        self.turn = asyncio.Lock()
        """Lock for everything that changes the state or depends on it."""

    async def start(self) -> tuple[int, int]:
        """Loads the model; returns the entries of its vocabulary and its longest sequence in tokens."""
        await self._ranks.start(CriticTrainer, self._config, timeout_s=self._config.rank_timeout_s)
        limits = await self._ask(CriticTrainer.limits)
        self._unused = True
        return limits

    @property
    def last_step(self) -> int:
        """The last step that was begun, or 0."""
        return self._once.last_step

    @property
    def timeline(self) -> int:
        """The timeline of the weights; 0 before a run has adopted, restored or trained them."""
        return self._at.timeline

    def check(self) -> None:
        """Begins with new ranks if one has died or is stuck. Raises the error of new ones that did not start: Serve
        then replaces the replica."""
        if self._failure:
            raise RanksLost(self._failure)
        if self._renewing is None and not self._restoring.locked():
            try:
                self._ranks.check()
            except RanksLost as error:
                self._renew(error)

    def expect_ranks(self) -> None:
        """Raises Unavailable if a rank has died or is stuck, and until others have taken their place."""
        try:
            self.check()
        except RanksLost as error:
            raise Unavailable(f"{error}; its replica will be replaced") from None
        if self._renewing is not None:
            raise Unavailable(STARTS_OTHERS)

    def stop(self) -> None:
        """Ends the ranks, for good."""
        self._failure = self._failure or "critic: stopped"
        if self._renewing is not None:
            self._renewing.cancel()
        self._ranks.stop()

    def _renew(self, reason: RanksLost) -> None:
        """Gives up what was trained, and begins to start new ranks."""
        log.warning("the critic starts new ranks, without its training: %s", reason)
        self._give_up_past()
        self._renewing = asyncio.ensure_future(self._renewed())

    async def _renewed(self) -> None:
        try:
            async with self._restoring:
                await self._begin_again()
        except Exception as error:
            log.error("the critic's new ranks did not start: %s", error)
            self._failure = str(error)
        finally:
            self._renewing = None

    def _give_up_past(self) -> None:
        self._once.restored(0)
        self._staged = StagedBatch(self._config.train_limits)
        self._at, self._taken, self._written = Moment(), "", ""
        self._pasts += 1

    async def _begin_again(self) -> None:
        """Ends the ranks and starts new ones."""
        self._ranks.stop()  # first: there may be no memory for both
        ranks = self._start_ranks(self._config)
        try:
            await ranks.start(CriticTrainer, self._config, timeout_s=self._config.rank_timeout_s)
        except BaseException:
            ranks.stop()
            raise
        self._ranks, self._unused, self._failure = ranks, True, ""

    def expect(self, lease: common_pb2.Lease, min_step: int | None) -> int:
        """The step of the weights.

        Raises:
            LeaseLost, OffTimeline: `min_step` is given, and the lease is not in force or the weights are not of its
                timeline.
            FailedPrecondition: fewer steps than `min_step` are trained so far.
        """
        if min_step is not None:
            self.fence.check(lease)
            self._at.check(lease.number, "this critic", "step")
            if self._at.number < min_step:
                raise FailedPrecondition(
                    f"min_step: {min_step} asked, but this critic has trained {self._at.number} so far"
                )
        return self._at.number

    async def adopt(self, lease: common_pb2.Lease, last_step: int) -> None:
        """Takes the weights as they are, which must be those after `last_step`, into the timeline of the lease."""
        self.fence.check(lease)
        async with self.turn:  # a step of the run before may be ending
            self.fence.check(lease)
            if last_step != self._at.number:
                raise FailedPrecondition(
                    f"last_step: {last_step} expected, but this critic has trained {self._at.number}, or failed "
                    "half-way in a step: restore a checkpoint, or deploy it again"
                )
            self._at = Moment(lease.number, last_step)

    async def values(self, asked: Sequence[Asked]) -> list[Floats]:
        """The values of trajectories, as CriticTrainer.values gives them. Call it while holding `turn`, so that the
        critic is not trained between the check of its state and the result."""
        trajectories = joined(asked)
        values = await self._ask(CriticTrainer.values, trajectories)
        return trajectories.with_sampled(values=values).rows("values")

    def stage(self, lease: common_pb2.Lease, step: int, row: int, part: Columns) -> None:
        """Holds a part of the batch of `step`, as StagedBatch.add does."""
        self.fence.check(lease)
        self._staged.add(Moment(lease.number, step), row, part)

    def staged(self, lease: common_pb2.Lease, step: int, rows: int) -> list[Columns]:
        """The parts of the batch of `step`, as StagedBatch.whole gives them."""
        self.fence.check(lease)
        return self._staged.whole(Moment(lease.number, step), rows)

    async def train(
        self,
        lease: common_pb2.Lease,
        step: int,
        parts: Sequence[Columns],
        last_step: int | None,
        **schedule: int,
    ) -> dict[str, float]:
        """Trains a step on the batch that these parts are, at most once, as CriticTrainer.train does.

        Raises:
            FailedPrecondition: a later step was trained, this one was trained on another batch, or the step before
                was not `last_step` of the lease's timeline, if given.
        """
        inputs = await asyncio.to_thread(digest, parts, schedule.values())
        self.fence.check(lease)
        if last_step is not None:
            self._expect(lease, self.last_step, last_step, step)
        action = partial(self._train, self._pasts, Moment(lease.number, step), parts, **schedule)
        return await self._once.run(step, inputs, action, lambda: self.fence.check(lease))

    async def _train(self, past: int, moment: Moment, parts: Sequence[Columns], **schedule: int) -> dict[str, float]:
        async with self.turn:
            self._expect_past(past, moment)  # lost while it waited for the step before
            try:
                shared = [self._ranks.share(part) for part in parts]
                metrics = await self._ask(CriticTrainer.train, *shared, **schedule)
                self._expect_past(past, moment)  # lost as the answer came: new ranks do not hold this step
            except BaseException:
                if past == self._pasts:
                    self._at = Moment()  # half a step belongs to no run's past
                raise
            self._at = moment
        return metrics

    def _expect_past(self, past: int, moment: Moment) -> None:
        if past != self._pasts:
            raise Unavailable(f"step: {moment.number} follows on training that is lost")

    async def save(self, lease: common_pb2.Lease, name: str) -> None:
        """Writes the model to the folder of this name, as RankLearner.save does; only this run may replace it."""
        self.fence.check(lease)
        with self._root.unnamed():
            place = self._root.place(name)
            async with self.turn:
                self.fence.check(lease)
                await self._ask(RankLearner.save, place, lease.run_id)

    async def take_checkpoint(self, lease: common_pb2.Lease, name: str, last_step: int, copies: bool) -> None:
        """Copies the state, which must be the one after `last_step`; without copies, writes it at once."""
        self.fence.check(lease)
        place = self._root.place(name)
        async with self.turn:  # a step may be ending, or have failed half-way
            self.fence.check(lease)
            self._expect(lease, self._at.number, last_step)
            self._taken = self._written = ""
            await self._ask(RankLearner.take_snapshot, place, last_step, copies=copies)
            self._taken = name

    async def write_checkpoint(self, lease: common_pb2.Lease, name: str) -> None:
        """Writes the state taken for `name` to disk, beside other calls."""
        self.fence.check(lease)
        if name and name == self._written:
            return
        if not name or name != self._taken:
            raise FailedPrecondition("name: no checkpoint was taken for it; call TakeCheckpoint first")
        with self._answering():
            await self._ranks.beside(self._config.ranks, RankLearner.write_snapshot, self._config.rank_timeout_s)
        self._written = name

    async def restore_checkpoint(self, lease: common_pb2.Lease, name: str) -> int:
        """Resumes from a checkpoint, with new ranks unless theirs are unused, since DeepSpeed restores only a model
        that was never trained; returns the last step that the checkpoint holds.

        Raises:
            InvalidArgument: the checkpoint does not exist or has another layout. If that is noticed only while it is
                loaded, the previous state is lost too, and the critic begins with new ranks.
        """
        self.fence.check(lease)
        folder = self._root.place(name)
        with self._root.unnamed():
            layout = Layout.read(folder / LAYOUT)
            layout.check(Layout.of(self._config, layout.parameters, layout.step))
            # Continues when the caller goes away, so that the critic is never half restored.
            await asyncio.shield(self._restore(lease, folder, layout.step))
        return layout.step

    async def _restore(self, lease: common_pb2.Lease, folder: Path, step: int) -> None:
        async with self._restoring:
            self.fence.check(lease)  # again, after waiting for another restoration
            unused, self._unused = self._unused, False
            self._give_up_past()
            try:
                if not unused:
                    with self._answering():
                        await self._begin_again()
                    self._unused = False
                with self._answering():
                    await self._ranks.call(RankLearner.restore, self._config.rank_timeout_s, folder)
            except BaseException:
                self._ranks.stop()
                raise
            self._once.restored(step)
            self._at = Moment(lease.number, step)

    def _expect(self, lease: common_pb2.Lease, actual: int, *steps: int) -> None:
        """Raises unless the actual step is one of these of the lease's timeline. A later one does not do here: what
        changes or keeps the state needs that very state."""
        self._at.check(lease.number, "this critic", "step")
        if actual not in steps:
            raise FailedPrecondition(f"last_step: {steps[0]} expected, but this critic has trained {actual}")

    async def _ask(
        self, method: Method[Arguments, Answer], /, *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Answer:
        self._unused = False
        with self._answering():
            return await self._ranks.call(method, self._config.rank_timeout_s, *arguments, **options)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Context of a call of the ranks. Unavailable if they are lost, in whose place others start then, unless
        others have it already."""
        ranks = self._ranks
        try:
            yield
        except RanksLost as error:
            if self._failure:
                fate = "its replica will be replaced"
            elif self._restoring.locked() and self._renewing is None:
                fate = "a checkpoint is being restored"
            elif ranks is not self._ranks:
                fate = "others are in their place"
            else:
                fate = STARTS_OTHERS
                if self._renewing is None:
                    self._renew(error)
            raise Unavailable(f"{error}; {fate}") from None
        except RankFailed as error:
            # Not a ServiceError, so that `translated` does not show its text to the caller.
            raise RuntimeError(str(error)) from error


def ranks_of(config: CriticConfig) -> RankGroup:
    """The critic's ranks, which have no model yet: a single one in the replica's place, several in their own."""
    # Imported here because it loads Ray, which ranks of another kind do not need.
    from quartet.ranks.ray_rank import makers_place, ray_ranks

    return ray_ranks("critic", config, makers_place() if config.ranks == 1 else None)
