"""Work and waits of each part of a run, against schedules by hand."""

import pytest

from orchestrator.tracing.activity import LOOP, PARTS, WORKING, parts_with, stretches
from orchestrator.tracing.samples import SampleStages
from orchestrator.tracing.shares import LOOPS, shares
from orchestrator.tracing.spans import Span, Spans, Window
from orchestrator.tracing.waits import Waits
from tests.unit.fake_clock import Clock


def span(track: str, name: str, began: float, ended: float) -> Span:
    return Span(track, 0, name, began, ended, {})


LOCK_STEP = Window(
    0.0,
    20.0,
    [
        # Two samples, the longer one until 6; scores of the first while the second is generated.
        *(span("rollout", "generate", 0, 4), span("rollout", "generate", 0, 6)),
        *(span("reward", "score", 4, 5), span("reference", "reference", 4, 7), span("values", "value", 6, 8)),
        *(span("loop", "samples", 0, 6), span("loop", "scores", 6, 8)),
        *(span("loop", "logprobs", 8, 10), span("policy", "logprobs", 8, 10)),
        # One second of the loop's own work; the critic trains longer than the policy.
        *(span("loop", "training", 11, 16), span("policy", "train", 11, 14), span("critic", "train", 11, 16)),
        *(span("loop", "push", 16, 18), span("push", "stage", 16, 17), span("push", "deliver", 16, 18)),
        span("loop", "checkpoint", 18, 19.5),
    ],
)


def test_shares_of_a_step_in_lock_step() -> None:
    assert shares(stretches(LOCK_STEP)) == pytest.approx(
        {
            # Of 20 s.
            "wait/loop/samples": 6 / 20,
            "wait/loop/scores": 2 / 20,
            "wait/loop/logprobs": 2 / 20,
            "wait/loop/training": 5 / 20,
            "wait/loop/push": 2 / 20,
            "wait/loop/evaluation": 0,
            "wait/loop/checkpoint": 1.5 / 20,
            "wait/loop/own": 1.5 / 20,  # 10 to 11, 19.5 to 20
            "work/rollout": 6 / 20,
            "wait/rollout/scoring": 2 / 20,
            "wait/rollout/policy": (2 + 3) / 20,
            "wait/rollout/critic": 2 / 20,  # 14 to 16
            "wait/rollout/push": 2 / 20,
            "wait/rollout/checkpoint": 1.5 / 20,
            "wait/rollout/loop": 1.5 / 20,
            "work/scoring": (3 + 1) / 20,  # 4 to 7 and 6 to 8
            "wait/scoring/rollout": 4 / 20,
            "wait/scoring/policy": (2 + 3) / 20,
            "wait/scoring/critic": 2 / 20,
            "wait/scoring/push": 2 / 20,
            "wait/scoring/checkpoint": 1.5 / 20,
            "wait/scoring/loop": 1.5 / 20,
            "work/policy": (2 + 3) / 20,
            "wait/policy/rollout": 6 / 20,
            "wait/policy/scoring": 2 / 20,
            "wait/policy/critic": 2 / 20,
            "wait/policy/push": 2 / 20,
            "wait/policy/checkpoint": 1.5 / 20,
            "wait/policy/loop": 1.5 / 20,
            "work/critic": 5 / 20,
            "wait/critic/rollout": 6 / 20,
            "wait/critic/scoring": 2 / 20,
            "wait/critic/policy": 2 / 20,
            "wait/critic/push": 2 / 20,
            "wait/critic/checkpoint": 1.5 / 20,
            "wait/critic/loop": 1.5 / 20,
            "work/push": 2 / 20,
            "wait/push/rollout": 6 / 20,
            "wait/push/scoring": 2 / 20,
            "wait/push/policy": (2 + 3) / 20,
            "wait/push/critic": 2 / 20,
            "wait/push/checkpoint": 1.5 / 20,
            "wait/push/loop": 1.5 / 20,
        }
    )


def test_what_overlaps_counts_once_and_goes_on_over_the_windows_edge() -> None:
    # Ahead of training: rollout samples until 3 and again from 5 on, a push is delivered from 2 to 5 beside training,
    # and the window cuts a span that began before it and one that ends after it.
    window = Window(
        10.0,
        20.0,
        [
            *(span("rollout", "generate", 5, 12), span("rollout", "generate", 11, 13)),
            span("rollout", "generate", 15, 25),
            span("push", "deliver", 12, 15),
            *(span("loop", "training", 10, 18), span("policy", "train", 10, 18)),
            span("reward", "score", 13, 14),
            span("loop", "samples", 18, 20),
        ],
    )
    parts = ("rollout", "scoring", "policy", "push")
    assert [(one.part, one.doing, one.began, one.ended) for one in stretches(window, parts)] == [
        (LOOP, "training", 10, 18),
        (LOOP, "samples", 18, 20),
        ("rollout", WORKING, 10, 13),
        ("rollout", "push", 13, 15),
        ("rollout", WORKING, 15, 20),
        # Without a sample to score it waits for those that are generated, else for what the loop waits for.
        ("scoring", "rollout", 10, 13),
        ("scoring", WORKING, 13, 14),
        ("scoring", "policy", 14, 15),
        ("scoring", "rollout", 15, 20),
        ("policy", WORKING, 10, 18),
        ("policy", "rollout", 18, 20),
        ("push", "policy", 10, 12),
        ("push", WORKING, 12, 15),
        ("push", "policy", 15, 18),
        ("push", "rollout", 18, 20),
    ]


@pytest.mark.parametrize(
    ("spans", "doing"),
    [
        # Nothing at all is the loop's own work, for which all parts wait.
        ([], {LOOP: "own", "rollout": LOOP, "policy": LOOP}),
        # Samples were asked for, but none is being generated: rollout does not wait for itself.
        ([span("loop", "samples", 0, 1)], {LOOP: "samples", "rollout": LOOP, "policy": "rollout"}),
        # The policy has its log-probs, and the critic's values are still to come.
        (
            [span("loop", "logprobs", 0, 1), span("values", "value", 0, 1)],
            {LOOP: "logprobs", "rollout": "scoring", "policy": "scoring"},
        ),
        # An environment answers before the next turn is sampled.
        (
            [span("loop", "samples", 0, 1), span("environment", "answer", 0, 1)],
            {LOOP: "samples", "rollout": "environment", "policy": "rollout"},
        ),
        # Training has begun and neither learner has.
        ([span("loop", "training", 0, 1)], {LOOP: "training", "rollout": LOOP, "policy": LOOP}),
        # The wait that began last counts.
        (
            [span("loop", "push", -1, 1), span("loop", "evaluation", -2, 1)],
            {LOOP: "push", "rollout": "push", "policy": "push"},
        ),
    ],
)
def test_who_is_waited_for_when_little_happens(spans: list[Span], doing: dict[str, str]) -> None:
    done = stretches(Window(0.0, 1.0, spans), ("rollout", "policy"))
    assert {one.part: one.doing for one in done} == doing
    assert all((one.began, one.ended) == (0, 1) for one in done)


def test_an_empty_window_has_shares_of_zero() -> None:
    assert shares(stretches(Window(1.0, 1.0, []))) == {f"wait/loop/{what}": 0.0 for what in LOOPS}


def test_the_wait_for_a_batch_is_for_its_own_samples_then_for_their_scores_then_the_loops_own() -> None:
    clock, written = Clock(), list[Span]()
    spans = Spans(written.extend, clock)
    waits = Waits(spans, parts_with(["policy"]))
    waits.begin()
    ahead = spans.on("rollout")("generate", sample=9)  # of a later batch, and longer
    one, two = (spans.on("rollout")("generate", sample=number) for number in (1, 2))
    clock.now = 1.0
    one.end()
    with waits.for_batch() as numbers:
        numbers |= {1, 2}
        clock.now = 3.0
        two.end()
        score = spans.on("reward")("score", sample=2)
        clock.now = 4.0
        score.end()
        clock.now = 6.0
        ahead.end()
        clock.now = 8.0
    metrics = waits.step(1)
    assert metrics["seconds/wall"] == 8.0
    # 0 to 1 and 4 to 8 are the loop's own, 1 to 3 samples, 3 to 4 scores.
    expected = {"samples": 2 / 8, "scores": 1 / 8, "own": 5 / 8}
    assert {what: metrics[f"wait/loop/{what}"] for what in expected} == pytest.approx(expected)
    assert "work/critic" not in metrics


def test_no_part_waits_for_a_batch_from_the_journal() -> None:
    clock = Clock()
    waits = Waits(Spans(clock=clock))
    with waits.for_batch() as numbers:
        numbers |= {1}
        clock.now = 2.0
    metrics = waits.step(1)
    assert metrics["wait/loop/own"] == 1.0
    # The shares of every part add up to 1, also of those that had nothing to do.
    assert {part: metrics[f"work/{part}"] + metrics[f"wait/{part}/loop"] for part in PARTS} == dict.fromkeys(PARTS, 1)


def test_the_speed_of_generation_is_per_second_in_which_rollout_works() -> None:
    """Two samples wait for a third and share its seconds; a fourth, of an evaluation, comes later."""
    clock = Clock()
    spans = Spans(clock=clock)
    waits, stages, held_out = Waits(spans), SampleStages(spans), SampleStages(spans, key="held_out")
    waits.begin()
    with stages("generate", [1, 2, 3]) as finished:
        clock.now = 4.0
        finished(1, tokens=10)
        finished(2, tokens=20)
        clock.now = 5.0
    clock.now = 8.0
    with held_out("generate", [1]) as finished:
        clock.now = 10.0
        finished(1, tokens=5)
    clock.now = 20.0
    assert waits.step(1)["tokens_per_s/generation"] == pytest.approx(35 / (5 + 2))
    assert "tokens_per_s/generation" not in waits.step(2)


def test_a_wait_that_fails_is_recorded() -> None:
    clock, written = Clock(), list[Span]()

    def fail(spans: Spans) -> None:
        with Waits(spans).for_batch():
            clock.now = 2.0
            raise RuntimeError

    with Spans(written.extend, clock) as spans, pytest.raises(RuntimeError):
        fail(spans)
    assert written == [Span("loop", 0, "samples", 0.0, 2.0, {"error": "RuntimeError"})]
