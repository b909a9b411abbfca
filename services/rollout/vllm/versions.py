"""Everything in which vLLM's versions differ: 0.32, and 0.26, the last one for torch 2.11. Each method tells them
apart by the methods that the engine has."""

from collections.abc import Iterator
from typing import Any, NoReturn

from services.common.wire.errors import Unavailable
from services.rollout.sample import VersionSpans


class WeightVersions:
    """The engine's own record of versions if it has one, otherwise ours."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._counts = hasattr(llm, "update_weight_version") and hasattr(llm, "get_weight_version")
        self.serving = 0
        """Version that serves now."""

    async def begin(self) -> None:
        """Tells the engine that its present weights are version 0."""
        if self._counts:
            await self._llm.update_weight_version("0")

    async def answer(self) -> None:
        """Makes the engine's process answer the simplest request."""
        if self._counts:
            await self._llm.get_weight_version()
        else:
            await self._llm.is_sleeping()

    async def finish(self, version: int) -> None:
        """Ends a weight update and gives its weights this version."""
        if self._counts:
            await self._llm.finish_weight_update(str(version))
        else:
            await self._llm.finish_weight_update()
        self.serving = version

    def running(self) -> int:
        """Number of unfinished requests."""
        if hasattr(self._llm, "get_num_unfinished_requests"):
            return int(self._llm.get_num_unfinished_requests())
        return int(self._llm.output_processor.get_num_unfinished_requests())

    async def release_cache(self) -> None:
        """Gives back the memory of the KV cache and keeps the weights. The engine is paused, and was started with
        `enable_sleep_mode`."""
        if hasattr(self._llm, "release_kv_cache_memory"):
            await self._llm.release_kv_cache_memory()
            return
        # 0.26 gives back both and brings back one. Its default would end the requests that are paused.
        await self._llm.sleep(level=1, mode="keep")
        await self._llm.wake_up(tags=["weights"])

    async def restore_cache(self) -> None:
        """Allocates the released KV cache again, which ends the pause in either version."""
        await self._llm.wake_up(tags=["kv_cache"])

    def spans(self, output: Any, began_with: int) -> VersionSpans:
        """The spans of a response that ended, whose request arrived while version `began_with` served.

        Raises:
            Unavailable: the weights changed meanwhile, and the engine did not record where; may be repeated.
        """
        if self._counts:
            return _spans(output.weight_versions)
        if began_with != self.serving:
            raise Unavailable(
                "the weights changed while this was sampled, and this vLLM does not say where; ask again"
            )
        return ((began_with, 0, len(output.token_ids)),)

    def spans_so_far(self, name: str, output: Any, began_with: int) -> VersionSpans:
        """The spans of a response that has not ended, of the request of this name; has to be called as soon as the
        output has come."""
        if not self._counts:
            return self.spans(output, began_with)
        # Handed out with the end of a response, but noted whenever tokens come.
        processor = self._llm.output_processor
        [internal] = processor.external_req_ids[name]
        return _spans(processor.request_states[internal]._weight_version_spans())


def _spans(noted: Any) -> VersionSpans:
    return tuple((int(span.version), span.start, span.end) for span in noted or ())


class ReceivingOnly:
    """The part of vLLM 0.26's transfer engine that a trainer would call, which 0.32 has elsewhere. It is abstract:
    without it 0.26 could not make the engine."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """Refuses: the learner sends by services/common/weight_transfer/sender.py."""
        raise NotImplementedError("weights are sent by Quartet's learner, see services/common/weight_transfer")
