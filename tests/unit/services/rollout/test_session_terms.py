"""Terms of sessions: what a run states, and who may."""

from typing import Any

import pytest

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.security.identity import ANONYMOUS, Caller
from quartet.wire.callers import Purpose
from quartet.wire.errors import InvalidArgument, PermissionDenied
from services.rollout.session_terms import KEPT_S, Terms, terms_of

ME = Caller("me", "trainer")
LEASE = {"run_id": "mine-1", "number": 1}
WRONG: list[Any] = [[], {}, "mine-1", {"run_id": "a"}, {"run_id": 1, "number": 1}]
OF_A_RUN = {"purpose": "training", "lease": LEASE, "min_version": 3, "max_version": 5}


def test_a_run_states_its_lease_its_versions_and_its_purpose() -> None:
    plain = {"temperature": 0.5, "seed": 1, "max_tokens": 8, "max_length": 64, "kept_s": 60.0}
    terms = Terms(**terms_of({"task_id": "t"} | plain | OF_A_RUN, ME))
    assert (terms.temperature, terms.seed, terms.max_tokens, terms.max_length, terms.kept_s) == (0.5, 1, 8, 64, 60.0)
    assert terms.purpose is Purpose.TRAINING
    lease = common_pb2.Lease(run_id="mine-1", number=1, identity="me")
    assert terms.versions == pb.GenerateRequest(lease=lease, min_version=3, max_version=5)
    one = Terms(**terms_of(OF_A_RUN | {"max_version": 3}, ME))
    assert one.versions == pb.GenerateRequest(lease=lease, min_version=3, max_version=3)


def test_who_asks_stands_in_the_lease_and_nothing_that_was_sent() -> None:
    assert Terms(**terms_of({"lease": LEASE}, ANONYMOUS)).versions == pb.GenerateRequest(lease=LEASE)
    with pytest.raises(InvalidArgument, match="lease: should be"):
        terms_of({"lease": LEASE | {"identity": "another"}}, ME)


def test_a_session_that_states_nothing_is_as_any() -> None:
    assert terms_of({"task_id": "t"}, ME) == {}
    assert Terms() == Terms(1.0, None, None, None, 3600.0, Purpose.FOREIGN, b"")


@pytest.mark.parametrize("name", OF_A_RUN)
def test_only_a_trainer_speaks_for_a_run(name: str) -> None:
    given = {name: OF_A_RUN[name]} | ({} if name == "purpose" else {"lease": LEASE})
    terms_of(given, ME)
    with pytest.raises(PermissionDenied, match="is for a run, and guest has the role sampler"):
        terms_of(given, Caller("guest", "sampler"))


def test_only_a_trainer_s_sessions_are_kept_for_long() -> None:
    guest = Caller("guest", "sampler")
    for seconds in (60.0, KEPT_S):
        assert terms_of({"kept_s": seconds}, guest) == {"kept_s": seconds}
    assert terms_of({"kept_s": 7200.0}, ME) == {"kept_s": 7200.0}
    with pytest.raises(PermissionDenied, match="kept_s: more than 3600 is for a run"):
        terms_of({"kept_s": 7200.0}, guest)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 0}, "temperature: 0; should be above 0"),
        ({"purpose": "mischief"}, "purpose: should be one of training, evaluation, foreign"),
        ({"purpose": 0}, "purpose: should be one of"),
        ({"purpose": []}, "purpose: should be one of"),
        ({"min_version": 3}, "lease: should be"),
        ({"min_version": 6, "max_version": 5, "lease": LEASE}, "min_version: 6; must be at most max_version, 5"),
        *(({"lease": wrong}, "lease: should be") for wrong in WRONG),
        *(
            ({"lease": {"run_id": "a", "number": number}}, "lease: should be")
            for number in (0, "1", 1 << 63, True, 1.5)
        ),
        ({"lease": {"run_id": "a" * 1000, "number": 1}}, "lease: should be"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        terms_of(given, ME)
