"""Samples, ages of tokens and seconds of a step, counted by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.experience.experience import Collected, Scored
from orchestrator.loop.state import TrainState
from orchestrator.loop.step_metrics import StepReport, ledger, speeds, staleness, turns
from orchestrator.tracing.spans import Spans
from orchestrator.tracing.waits import Waits
from quartet.columns import Columns
from services.rollout.sample import FinishReason, Sample
from tests.unit.experiences import Experience, collected
from tests.unit.fake_clock import Clock
from tests.unit.fakes import make_prompts

NONE = np.empty(0, np.float32)


def batch() -> Collected:
    """Responses of 4, 1 and 2 tokens, of versions 3, 5 and 5, and 6, of which 3, 0 and 1 tokens came from a replica
    that did not finish them; two samples were discarded, one of them without a score."""
    made = []
    for row, (versions, kept) in enumerate([([3, 3, 3, 5], 3), ([5], 0), ([6, 6], 1)]):
        spans = tuple((version, at, at + 1) for at, version in enumerate(versions))
        ids, logprobs = np.zeros(len(versions), np.int32), np.zeros(len(versions), np.float32)
        sample = Sample(row, ids, logprobs, FinishReason.STOP, spans, kept=kept)
        made.append(Experience(row, make_prompts(3)[row], sample, 1.0, NONE, NONE))
    return collected(made, 2.0, 0.5, repeated=4, discarded=(Scored(3, 0, math.nan), Scored(4, 0, 1.0)))


def test_the_ledger_of_a_second_step() -> None:
    before = TrainState(step=1, first_version=6, first_critic_step=None, samples_asked=12, samples_used=3)
    made = batch()
    after = before.advanced(kl_coef=None, normalisers={}, asked=9, used=made.scored, discarded=2)
    assert ledger(before, after, made) == {
        "samples/asked": 9,
        "samples/repeated": 4,
        "samples/discarded": 2,
        "samples/unscored": 1,
        "samples/resumed": 2,
        "samples/tokens_kept": 4,
        "samples/used": 3,
        "samples/used_total": 6,
        "prompts/seen": 3,
        "policy/version": 8,
        "policy/staleness": 4,
    }


def test_every_age_of_tokens_up_to_the_oldest_has_its_share() -> None:
    ages = {"staleness/mean": (3 * 4 + 2 * 2 + 2) / 7}
    shares = (0, 2 / 7, 2 / 7, 0, 3 / 7)
    expected = ages | {f"staleness/share_{age}": share for age, share in enumerate(shares)}
    assert staleness(7, batch()) == pytest.approx(expected)


def test_the_wait_within_groups_is_told_where_there_is_one() -> None:
    alone = {"tokens_per_s/training": 7 * 2 / 4, "seconds/generate": 2, "seconds/score": 0.5}
    assert speeds(batch(), 4.0, 2) == alone
    assert speeds(replace(batch(), group_s=0.25), 4.0, 2) == alone | {"seconds/group": 0.25}


def test_each_sequence_of_a_trajectory_counts() -> None:
    """Two trajectories, of which the first has two sequences."""
    sampled = np.asarray([False, True, False, True, False, True])
    columns = Columns.of(np.arange(6, dtype=np.int32), np.asarray([4, 2], np.int32), sampled, np.arange(6) == 2)
    columns = columns.with_rows(turn=np.asarray([4, 1])).with_sampled(turn_rewards=np.zeros(3, np.float32))
    assert turns(Collected(columns, make_prompts(2), 0.0, 0.0)) == {"turns/mean": 2.5, "sequences/mean": 1.5}


def test_a_stage_that_comes_twice_counts_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(10.0)
    monkeypatch.setattr("orchestrator.loop.step_metrics.time.monotonic", clock)
    report = StepReport(Waits(Spans(lambda written: None)))
    for seconds in (2.0, 0.5):
        clock.now += 1
        with report.stage("train"):
            clock.now += seconds
    assert (report.seconds("train"), report.elapsed_s) == (2.5, 4.5)
    assert report.metrics() == {"seconds/train": 2.5}
