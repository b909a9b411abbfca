"""The source of the loop's experience: the services, and the journal for steps that were sampled before."""

from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import PromptStream
from orchestrator.experience.beside import Beside
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Collected
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.requests import Used
from orchestrator.experience.slots import Slots
from orchestrator.experience.stream import Stream


class ExperienceSource:
    """Opens streams of experience, each from where a run is: at its start, or at a checkpoint."""

    def __init__(
        self,
        config: OrchestratorConfig,
        prompts: PromptStream,
        collector: Collector,
        journal: ExperienceJournal | None,
    ) -> None:
        """
        Args:
            config: size of batches, how much is sampled ahead, and number of steps.
            prompts: the stream of prompts.
            collector: samples and scores.
            journal: keeps the batches that were taken; None for no journal.
        """
        self._config = config
        self._prompts = prompts
        self._collector = collector
        self._journal = journal

    def open(self, beside: Beside, *, step: int, version: int, used: Used) -> Stream:
        """The stream of the steps after `step`.

        The steps that follow and are in the journal come from there: nothing of them is sampled again, and they are
        trained on by the versions that they were taken for, so that their samples are as old as they were. The
        stream holds them in memory until then.

        Args:
            beside: runs the sampling. A failure of a service ends its block at once.
            step: steps done.
            version: version that the replicas serve, and that trains on the next batch.
            used: samples trained on or discarded.
        """
        config, kept = self._config, self._kept(step, used)
        slots = Slots(
            config.batch_size // config.algorithm.samples_per_prompt,
            staleness=config.loop.max_staleness,
            depth=config.loop.ahead,
            version=version,
            last=version + config.steps - step - 1,
            kept=len(kept),
        )
        return Stream(config, self._prompts, self._collector, self._journal, beside, slots, used, kept, step=step)

    def _kept(self, step: int, used: Used) -> dict[int, Collected]:
        """The batches of the steps after `step` up to the first that the journal does not hold."""
        kept: dict[int, Collected] = {}
        while self._journal and (batch := self._journal.read(step + 1, self._prompts.dealt)):
            numbers = batch.numbers
            if any(number in used for number in numbers):
                break  # of an abandoned timeline
            step, used = step + 1, used.plus(numbers)
            kept[step] = batch
        return kept
