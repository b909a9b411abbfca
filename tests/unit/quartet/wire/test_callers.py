"""The metadata in which callers declare their run and purpose."""

from quartet.wire.callers import LONGEST_NAME, PURPOSE, RUN, Purpose, declared


def test_a_declaration_is_plain_metadata() -> None:
    assert declared("demo", Purpose.TRAINING) == ((RUN, "demo"), (PURPOSE, "training"))
    [(_, name), _] = declared("é" * 100, Purpose.FOREIGN)
    assert name == "?" * LONGEST_NAME


def test_a_purpose_that_is_none_is_foreign() -> None:
    assert [Purpose.parse(text) for text in ("training", "Evaluation", "root", "")] == [
        Purpose.TRAINING,
        Purpose.EVALUATION,
        Purpose.FOREIGN,
        Purpose.FOREIGN,
    ]
