"""Prompts and responses as columns, and columns as rows, for tests that think in rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quartet.columns import Columns


def of(prompts: Sequence[Any], responses: Sequence[Any], **sampled: Any) -> Columns:
    """Trajectories of prompts and responses, token ids each, with columns of one number per response token: B rows
    each, or one array for all of them."""
    ids = [[np.asarray(row, np.int32) for row in side] for side in (prompts, responses)]
    columns = {name: joined(rows) for name, rows in sampled.items()}
    return Columns.of_pairs(*ids).with_sampled(**columns)


def joined(rows: Any) -> Any:
    """One array of the numbers of all rows: float32, or bool."""
    values = np.asarray(rows) if isinstance(rows, np.ndarray) else np.concatenate([np.empty(0, np.bool_), *rows])
    return values.astype(np.bool_ if values.dtype == np.bool_ else np.float32)


def cut(values: Any, responses: Sequence[Any]) -> list[Any]:
    """The numbers of each response, of an array that has all of them."""
    return list(np.split(values, np.cumsum([len(response) for response in responses])[:-1]))
