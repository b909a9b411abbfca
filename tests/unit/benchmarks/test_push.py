"""The ratios that benchmarks/push prints."""

from benchmarks.push import _cells


def test_the_price_of_a_proof_is_that_of_the_push_which_is_proved() -> None:
    seconds = {"bare_s": 1.0, "transfer_s": 1.5, "push_s": 2.0, "layers_s": 6.0, "join_s": 1.0, "proved_s": 2.5}
    assert _cells(seconds)[5:] == ["1.50", "2.00", "3.00", "0.50", "0.25"]
