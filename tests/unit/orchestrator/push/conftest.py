"""The learner's end of pushes."""

import pytest

from tests.unit.fake_fleet import FakeSource


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()
