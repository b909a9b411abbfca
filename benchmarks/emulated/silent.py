"""Parts that a loop needs besides services and learners, for where they do not matter."""

from typing import Any


class Silent:
    """A metrics log, a progress display and checkpoints that do nothing."""

    async def first(self, state: Any) -> None:
        """Writes no checkpoint."""

    async def take_if_due(self, state: Any, *, last: bool) -> None:
        """Writes no checkpoint."""

    def waited_s(self) -> float:
        """Training never waits for one."""
        return 0.0

    async def pause(self) -> None:
        """Goes on at once."""

    def __getattr__(self, name: str) -> Any:
        """A method that does nothing and returns None."""
        return lambda *arguments, **options: None
