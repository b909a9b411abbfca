"""The timeline of a run, which tells an abandoned past from mere age."""

from dataclasses import dataclass

from quartet.wire.errors import OffTimeline


@dataclass(frozen=True, slots=True)
class Moment:
    """The version of a policy or the step of a critic, and the timeline that it was made on.

    A timeline is the number of the run's lease; the run claims a higher one when it goes back to a checkpoint. Within
    a timeline a larger number is later. Across two the numbers say nothing. For example:

        (3, 6), (3, 7)     two versions of timeline 3; the second serves all who ask for 6 or more.
        (4, 6)             the run went back to version 5 and claimed lease 4. A replica that missed this push still
                           holds (3, 7), which is not a later version than 6 but one of an abandoned timeline.
    """

    timeline: int = 0
    """Number of the timeline; 0 until a run pushes weights or trains a step here."""
    number: int = 0
    """The version or step."""

    def check(self, timeline: int, where: str, noun: str) -> None:
        """Returns if this is of the given timeline.

        Args:
            timeline: number of the lease that came with a call.
            where: what holds this, for the error.
            noun: "version" or "step", for the error.

        Raises:
            OffTimeline: it is of an abandoned timeline, or of none.
        """
        if self.timeline != timeline:
            none = "no timeline, having just started or failed half-way"
            its = f"an abandoned timeline ({self.timeline})" if self.timeline else none
            raise OffTimeline(
                f"timeline: {where} holds {noun} {self.number} of {its}; the run is at timeline {timeline}"
            )
