"""Fixtures that play the phases of a push to a member with a fake engine."""

import pytest

from services.rollout.member import WeightMember
from tests.unit.member_phases import FakeEngine, held


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def member(engine: FakeEngine) -> WeightMember:
    return await held(engine)
