"""The complaints about values, for tests of configuration."""

from typing import Any

import pytest

from quartet.config.base import Config, ConfigError


def problems(kind: type[Config], values: Any, where: str = "root") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        kind.parse(values, where)
    return str(caught.value).splitlines()
