"""Safe output of foreign text in a terminal."""


def printable(text: str) -> str:
    """`text` with control characters, such as those of terminal escape sequences, written out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
