"""Names of scores, where a response has several."""

from typing import Annotated

from quartet.config.base import matching

_WORD = r"[A-Za-z](?:[\w-]*[A-Za-z0-9])?"
# The metric `eval/score/right_low` is a bound of `eval/score/right`.
_FREE = r"(?!score$)(?!.*_(?:low|high)$)"
_FORM = "letters, digits, `_` and `-`, a letter first; not `score`, nor with `_low` or `_high` at its end"

ScoreName = Annotated[str, matching(rf"{_FREE}{_WORD}", _FORM)]
"""A name that a scorer gives to one of its scores."""
AnyScoreName = Annotated[str, matching(rf"{_FREE}{_WORD}(?:\.{_WORD})*", f"{_FORM}; with dots between such parts")]
"""The same, or one of a scorer within several: `rules.right`."""
