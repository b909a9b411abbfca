"""Checks of what benchmarks are told by their options: before anything starts, and not after an hour."""

from collections.abc import Collection, Iterable

import typer


def check_known(given: Iterable[str], known: Collection[str], option: str) -> None:
    """Raises typer.BadParameter if one of the names that an option gives is not known."""
    if unknown := [name for name in given if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}; should be of {', '.join(known)}", param_hint=option)


def numbers(text: str, option: str, least: int = 0) -> list[int]:
    """The numbers of an option such as `1,2,4`; none of an empty one.

    Raises:
        typer.BadParameter: it has something else, or a number below `least`.
    """
    given = [part.strip() for part in text.split(",") if text]
    if not all(part.isdecimal() and int(part) >= least for part in given):
        raise typer.BadParameter(f"{text!r} should be numbers from {least} on, such as 1,2,4", param_hint=option)
    return [int(part) for part in given]
