"""The critic behind its service: the ranks that hold the model, the steps they trained, and their checkpoints."""

import asyncio
from pathlib import Path
from typing import Any

from services.common.arrays import Floats, Ints
from services.common.errors import FailedPrecondition, InvalidArgument, Unavailable
from services.common.layout import LAYOUT, Layout
from services.common.rank_group import RankFailed, RankGroup, RanksLost
from services.critic.config import CriticConfig
from services.critic.once import Once
from services.critic.trainer import CriticBatch, CriticTrainer


class CriticModel:
    """Every method raises Unavailable once a rank was lost, as Serve then starts the replica anew, and while a
    checkpoint is being restored."""

    def __init__(self, config: CriticConfig) -> None:
        self._config = config
        self._once: Once[dict[str, float]] = Once()
        self._ranks = start_ranks(config)
        self._taken = self._written = ""
        self._restoring = asyncio.Lock()

    async def start(self) -> tuple[int, int]:
        """Loads the model; entries of its vocabulary, and its longest sequence in tokens."""
        await self._ranks.start(CriticTrainer, self._config, timeout_s=self._config.rank_timeout_s)
        limits: tuple[int, int] = await self._run("limits")
        return limits

    @property
    def last_step(self) -> int:
        """The last step trained, or 0."""
        return self._once.last_step

    def check(self) -> None:
        """Raises RanksLost if a rank has died or is stuck."""
        if not self._restoring.locked():
            self._ranks.check()

    def stop(self) -> None:
        """Ends the ranks."""
        self._ranks.stop()

    async def values(self, prompts: list[Ints], responses: list[Ints], last_step: int | None) -> list[Floats]:
        """See CriticTrainer.values; FailedPrecondition unless `last_step`, if given, was trained last."""
        self._expect(last_step)
        values: list[Floats] = await self._run("values", prompts, responses)
        return values

    async def train(self, step: int, batch: CriticBatch, last_step: int | None, **schedule: int) -> dict[str, float]:
        """See CriticTrainer.train; once for each step.

        Raises:
            FailedPrecondition: a later step was trained, or another than `last_step`, if given, came before.
        """
        if step != self.last_step:
            self._expect(last_step)
        return await self._once.run(step, lambda: self._run("train", batch, **schedule))

    async def save(self, path: str) -> Path:
        """See CriticTrainer.save."""
        return Path(await self._run("save", path))

    async def take_checkpoint(self, path: str, last_step: int, copies: bool) -> None:
        """Copies the state after `last_step`, which must be now; without copies, writes it."""
        self._expect(last_step)
        self._taken = self._written = ""
        await self._run("take_snapshot", _absolute(path), last_step, copies)
        self._taken = path

    async def write_checkpoint(self, path: str) -> None:
        """Brings what was taken for `path` to disk, beside whatever else goes on."""
        if path == self._written:
            return
        if path != self._taken:
            raise FailedPrecondition(f"path: nothing was taken for {path}")
        await self._answer(
            self._ranks.beside(self._config.ranks, "write_snapshot", timeout_s=self._config.rank_timeout_s)
        )
        self._written = path

    async def restore_checkpoint(self, path: str) -> int:
        """Goes on from a checkpoint, with ranks that are new, as DeepSpeed restores only what was never trained; the
        last step it holds.

        Raises:
            InvalidArgument: there is no such checkpoint, or it is of another layout. If that shows only as it is
                loaded, the critic as it was is gone too, and Serve starts the replica anew.
        """
        folder = _absolute(path)
        layout = Layout.read(Path(folder) / LAYOUT)
        layout.check(Layout.of(self._config, layout.parameters, layout.step))
        # A caller that goes away half-way does not leave half a critic.
        await asyncio.shield(asyncio.ensure_future(self._restore(folder, layout.step)))
        return layout.step

    async def _restore(self, folder: str, step: int) -> None:
        async with self._restoring:
            self._ranks.stop()
            ranks, timeout_s = start_ranks(self._config), self._config.rank_timeout_s
            await self._answer(ranks.start(CriticTrainer, self._config, timeout_s=timeout_s))
            await self._answer(ranks.call("restore", folder, timeout_s=timeout_s))
            self._once.restored(step)
            self._ranks, self._taken, self._written = ranks, "", ""

    def _expect(self, last_step: int | None) -> None:
        if last_step is not None and last_step != self.last_step:
            raise FailedPrecondition(
                f"last_step: {last_step} expected, but this critic has trained {self.last_step}: it was replaced, "
                "or serves another run; restore a checkpoint"
            )

    async def _run(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await self._answer(
            self._ranks.call(method, *arguments, timeout_s=self._config.rank_timeout_s, **options)
        )

    async def _answer(self, call: Any) -> Any:
        try:
            return await call
        except RanksLost as error:
            fate = "a checkpoint is being restored" if self._restoring.locked() else "its replica will be replaced"
            raise Unavailable(f"{error}; {fate}") from None
        except RankFailed as error:
            # No ServiceError: `translated` keeps its text from the caller.
            raise RuntimeError(str(error)) from error


def start_ranks(config: CriticConfig) -> RankGroup:
    """The critic's ranks, without a model yet: one in this process, several as Ray actors."""
    if config.ranks == 1:
        from services.common.thread_rank import ThreadRank

        return RankGroup("critic", [ThreadRank(config.rank_timeout_s)])
    from services.common.ray_rank import ray_ranks

    return ray_ranks("critic", config)


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise InvalidArgument(f"path: {path!r}; must be absolute, on a disk that all nodes share")
    return path
