"""The difference between two engines' log-probs that is rounding."""

FACTOR = 5.0


class Tolerance:
    """Largest mean difference of log-probs that counts as rounding, in the unit of its bounds.

    How differently two engines round depends on the model, its dtype and the hardware. The first measurement shows
    it, since a run begins with the same weights on both sides; later ones may be FACTOR times as large.
    """

    def __init__(self, least: float, most: float) -> None:
        """
        Args:
            least: the tolerance is never below, however little the first measurement is.
            most: the tolerance is never above, and this before the first measurement.
        """
        self._least = least
        self._most = most
        self._measured: float | None = None

    @classmethod
    def of(cls, configured: float | None, bounds: tuple[float, float]) -> "Tolerance":
        """The configured tolerance, which does not change; without one a tolerance within the bounds."""
        return cls(*bounds) if configured is None else cls(configured, configured)

    @property
    def now(self) -> float:
        """The tolerance now."""
        if self._measured is None:
            return self._most
        return min(self._most, max(self._least, FACTOR * self._measured))

    def learn(self, difference: float) -> None:
        """Takes a mean difference within the tolerance; only the first of a run counts."""
        if self._measured is None:
            self._measured = difference
