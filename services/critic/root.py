"""The folder under which callers may name folders; nothing outside of it is read, written or revealed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quartet.wire.errors import InvalidArgument

LONGEST_PATH = 1000
"""Most characters of a name, including its folders."""
_NAME = re.compile(r"[\w.-]{1,255}", re.ASCII)


class Root:
    """Turns names into folders below a root, and keeps the root's path out of errors."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).resolve()

    def place(self, name: str) -> Path:
        """The folder with this name, which need not exist.

        Raises:
            InvalidArgument: the name is not valid, or leads out of the root through a link.
        """
        parts = name.split("/")
        if len(name) > LONGEST_PATH or not all(_NAME.fullmatch(part) and part.strip(".") for part in parts):
            raise InvalidArgument(
                f"name: {name[:LONGEST_PATH]!r}; must be names of letters, digits, _, - and . under the critic's "
                f"root, with / between them, at most {LONGEST_PATH} characters"
            )
        place = self.folder.joinpath(*parts)
        if self.folder not in place.resolve().parents:
            raise InvalidArgument(f"name: {name}; leads out of the critic's root")
        return place

    @contextmanager
    def unnamed(self) -> Iterator[None]:
        """Context that removes the root's path from errors for the caller."""
        try:
            yield
        except InvalidArgument as error:
            raise InvalidArgument(str(error).replace(f"{self.folder}/", "").replace("path: ", "name: ")) from None
