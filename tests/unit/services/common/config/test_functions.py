"""Functions named by import path."""

import re

import pytest

from services.common.config.base import ConfigError
from services.common.config.functions import load_function


def test_a_function_by_its_path() -> None:
    assert load_function("posixpath:basename")(["x"][0]) == "x"  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such:f", "function: 'no_such:f' should be package.module:name, but cannot be imported: No module"),
        ("math:no_such_name", "function: 'math:no_such_name' should be package.module:name"),
        ("math", "function: 'math' should be package.module:name"),
        (":f", "function: ':f' should be package.module:name"),
        (".relative:f", "function: '.relative:f' should be package.module:name"),
        ("", "function: '' should be package.module:name"),
        ("math:pi", "function: 'math:pi' is not a function"),
        ("asyncio:sleep", "function: 'asyncio:sleep' is an async function; write it with def"),
    ],
)
def test_paths_that_lead_nowhere(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_function(path)
