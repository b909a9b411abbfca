"""Sessions in the process of a test, in the place of the actor that holds them."""

from typing import Any

from services.rollout.sessions import Sessions


class LocalSessions:
    """A SessionStore."""

    def __init__(self) -> None:
        self.held = Sessions()
        self.tokenizer = "t"
        self.failure: Exception | None = None
        """Raised by each call."""

    async def ask(self, method: str, *args: Any) -> Any:
        if self.failure:
            raise self.failure
        return getattr(self.held, method)(*args)

    async def counts(self) -> dict[str, int]:
        return self.held.counts()
