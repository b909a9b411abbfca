"""Keys of sessions: each opens one, also where several were started together."""

import pytest

from quartet.security.session_key import SESSION, SessionKeys, key_of, new_session
from quartet.wire.errors import Unauthenticated


def test_a_key_of_several_opens_its_own_session_alone() -> None:
    keys, base = SessionKeys(), new_session()
    of_all = keys.make("me", base)
    made = [key_of(of_all, place) for place in range(3)]
    assert [name for name, _ in made] == [f"{base}-{place}" for place in range(3)]
    assert all(SESSION.fullmatch(name) for name, _ in made)
    assert [keys.read(key) for _, key in made] == [("me", name) for name, _ in made]
    assert len({key for _, key in made}) == 3
    # That of one makes none of another, nor that of all.
    (name, key), (other, _), _ = made
    seal = key.rpartition("~")[2]
    for forged in (key.replace(name, other), f"qs~me~{base}~{seal}", key.replace("~me~", "~you~"), f"{key}0"):
        with pytest.raises(Unauthenticated):
            keys.read(forged)
    again = key_of(key, 1)[1]
    with pytest.raises(Unauthenticated):
        keys.read(again)


def test_another_door_takes_none_of_them() -> None:
    _, key = key_of(SessionKeys().make("me", new_session()), 0)
    with pytest.raises(Unauthenticated):
        SessionKeys().read(key)
