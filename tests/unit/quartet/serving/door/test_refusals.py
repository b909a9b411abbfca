"""Refused calls in the log."""

from quartet.serving.door.refusals import EVERY_S, Refusals


def test_the_first_is_logged_at_once_and_the_next_thousand_are_one_line(logged: list[str]) -> None:
    now = [100.0]
    refusals = Refusals(lambda: now[0])
    for number in range(1001):
        refusals.note("/quartet.v1.Critic/Save", f"ipv4:10.0.0.9:{number}", "no proof")
    assert logged == ["refused /quartet.v1.Critic/Save from ipv4:10.0.0.9:0: no proof"]
    now[0] += EVERY_S
    refusals.note("/quartet.v1.Critic/Save", "ipv4:10.0.0.9:1", "no proof")
    assert logged[-1].endswith("no proof (1000 more since the last such line)")
    assert len(logged) == 2
