"""The version of the weights that sampled each token. vLLM 0.32 records it; 0.26 (the last for torch 2.11) does
not."""

from typing import Any

from services.common.wire.errors import Unavailable

Spans = tuple[tuple[int, int, int], ...]
"""(version, first token, one past the last token) of each run of tokens, as in rollout.proto."""


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

    def spans(self, output: Any, begun: int) -> Spans:
        """The spans of a finished response whose request arrived while version `begun` served.

        Raises:
            Unavailable: the weights changed meanwhile, and the engine did not record where; may be repeated.
        """
        if self._counts:
            return tuple((int(span.version), span.start, span.end) for span in output.weight_versions or ())
        if begun != self.serving:
            raise Unavailable(
                "the weights changed while this was sampled, and this vLLM does not say where; ask again"
            )
        return ((begun, 0, len(output.token_ids)),)
