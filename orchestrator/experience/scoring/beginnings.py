"""Beginnings of responses, which reward model and reference compute while the rest is still sampled."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from orchestrator.clients import Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.experience.beside import Beside
from orchestrator.experience.requests import SampleRequest
from quartet.wire.errors import ServiceError
from quartet.wire.ragged import Ragged
from services.rollout.sample import OnParts, Part

ENOUGH_TOKENS = 256
"""New tokens that are worth a pass: fewer take a core longer per token."""

Begin = Callable[[Ragged, Ragged], Awaitable[bool]]
"""Sends prompts and what there is of their responses; False if the service keeps nothing of them."""


class Beginnings:
    """Sends reward model and reference what has come of unfinished responses.

    They keep what they compute of it, so that after a response's last token only the tokens that came last are left
    to compute. The answers hold nothing. A service that keeps nothing says so in its first answer, and is not asked
    again.
    """

    def __init__(self, services: Services, config: OrchestratorConfig, end_ids: Sequence[int] = ()) -> None:
        """Arguments as of Collector."""
        timeout_s, sampling = config.timeouts.score_s, config.sampling
        self._begin: dict[str, Begin] = {
            "reward": lambda prompts, responses: services.reward.begin(prompts, responses, timeout_s=timeout_s)
        }
        if (reference := services.reference) is not None:
            self._begin["reference"] = lambda prompts, responses: reference.begin(
                prompts,
                responses,
                temperature=sampling.temperature,
                min_new_tokens=sampling.min_new_tokens,
                end_ids=end_ids if sampling.min_new_tokens else (),
                timeout_s=timeout_s,
            )

    def of(self, requests: Sequence[SampleRequest], beside: Beside) -> OnParts | None:
        """The argument `on_parts` of RolloutClient.generate for one call; None if no service makes use of parts.

        Args:
            requests: those of the call.
            beside: makes the calls, one at a time to each service, and ends them with the sampling. Their failures
                are ignored: the calls for the whole responses meet them again, and handle them.
        """
        if not self._begin:
            return None
        sent: dict[str, dict[int, int]] = {service: {} for service in self._begin}
        busy: set[str] = set()

        async def send(service: str, prompts: Ragged, responses: Ragged) -> None:
            try:
                if not await self._begin[service](prompts, responses):
                    self._begin.pop(service, None)
            except ServiceError:
                pass
            finally:
                busy.discard(service)

        def heard(parts: Mapping[int, Part]) -> None:
            lengths = {index: len(part.response_ids) for index, part in parts.items()}
            for service in self._begin.keys() - busy:
                known = sent[service]
                new = {i: count for i, length in lengths.items() if (count := _new(length, known.get(i, 0)))}
                if sum(new.values()) < ENOUGH_TOKENS:
                    continue
                known |= lengths
                busy.add(service)
                prompts = Ragged.of([requests[index].prompt.prompt_ids for index in new])
                responses = Ragged.of([parts[index].response_ids for index in new])
                beside.start(send(service, prompts, responses), f"beginnings for {service}")

        return heard


def _new(length: int, known: int) -> int:
    """New tokens of a response; all, if it has become shorter, as it was begun again."""
    return length if length < known else length - known
