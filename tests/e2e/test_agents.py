"""Runs whose conversations an agent has by OpenAI's protocol: the samples that the run itself would ask for, also
where replicas, sessions, agents or the run are lost."""

from typing import Any

import numpy as np
import psutil
import pytest

from examples.agent import WRONG
from orchestrator.monitoring.metrics import read_metrics
from quartet.columns import Columns
from quartet.wire.pairs import SCORE
from tests.cluster import Quartet, named, rollouts
from tests.models import EOS, make_tokenizer
from tests.runs import Run, finish_held, journal, write_rows

REWRITING = {"kind": "tests.agents:rewriting", "max_tokens": 48, "sequences": 3}
STEPS, BATCH, EACH, MOST = 3, 16, 4, 12
RLOO = {"kind": "rloo", "samples_per_prompt": EACH, "scale": "none"}
"""Without a critic, which an earlier run would have trained."""
TOLD = [*make_tokenizer()(WRONG, add_special_tokens=False)["input_ids"], EOS, 5]
"""Tokens of the agent's second question, as the template of tests/cluster.py writes them."""
SAME = ("number", "group", "row", "truncated", "turn")


def with_labels(quartet: Quartet, name: str, *, chat_template: bool = False, **section: Any) -> Run:
    run = Run(quartet, name, without=["critic"], **RLOO)
    rows = [{"prompt": f"w{4 + row} w{5 + row}", "label": f"w{4 + row % 60}"} for row in range(40)]
    prompts = write_rows(quartet, "for-agents.jsonl", rows)
    data = {"path": str(prompts), "label_key": "label", "max_prompt_length": 16}
    with run.changing() as raw:
        raw["orchestrator"] |= {
            "steps": STEPS,
            "data": data | ({"chat_template": True} if chat_template else {}),
            "sampling": {"max_new_tokens": MOST},
            "loop": {"max_staleness": 0},
        }
        # The folder whose template the rollout service renders messages with.
        raw["orchestrator"]["policy"]["model"] = raw["applications"][0]["args"]["model"]
        raw["orchestrator"] |= section
    return run


def by_agent(quartet: Quartet, name: str, kind: str = "examples.agent:solve", **section: Any) -> Run:
    return with_labels(quartet, name, agent={"kind": kind, "max_tokens": 48}, **section)


def assert_same_samples(run: Run, wanted: Run) -> None:
    """The same conversations, token for token, and scores but for rounding: those of a later step come from the
    weights of the steps before it."""
    for mine, theirs in zip(journal(run), journal(wanted), strict=True):
        for name in ("ids", "lengths", "sampled"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
        for name in SAME:
            assert np.array_equal(mine[name], theirs[name]), name
        for name in ("score", "logprobs", "ref_logprobs"):
            assert np.abs(mine[name] - theirs[name]).max() < 1e-5, name


def check_conversations(columns: Columns) -> int:
    """Checks each conversation of a step; returns the number of those with two turns."""
    second = 0
    for row in range(len(columns)):
        first, *others = [part.tolist() for part in columns.segments(row)]
        label = 4 + int(columns["row"][row]) % 60
        # The label in the first answer ends a conversation; the template ends a turn that was cut off.
        assert (label in first) is (not others)
        if others:
            told, answer = others
            assert told == ([] if first[-1] == EOS else [EOS]) + TOLD
            assert columns.counts[row] == len(first) + len(answer)
            second += 1
    return second


@pytest.fixture(scope="module")
def straight(quartet: Quartet) -> Run:
    """A run that nothing happened to."""
    run = by_agent(quartet, "by-agent")
    run.finish()
    return run


def test_conversations_are_those_that_an_environment_would_have_had(quartet: Quartet, straight: Run) -> None:
    lines = read_metrics(straight.folder / "metrics.jsonl")
    assert all(line["mismatch/max_abs"] < 1e-4 for line in lines)
    two = [check_conversations(columns) for columns in journal(straight)]
    assert 0 < sum(two) < STEPS * BATCH
    assert [line["turns/mean"] for line in lines] == [1 + count / BATCH for count in two]
    assert not any("calls/mean" in line for line in lines)  # which the agent alone knows
    environment = {"kind": "tests.environments:InMessages", "max_turns": 2, "max_tokens": 48}
    wanted = with_labels(quartet, "by-environment", chat_template=True, environment=environment)
    wanted.finish()
    assert_same_samples(straight, wanted)


def test_a_run_killed_amid_conversations_ends_as_one_that_was_not(quartet: Quartet, straight: Run) -> None:
    run = by_agent(quartet, "agent-killed")
    run.killed(run.reached(1))
    run.finish("--resume")
    assert_same_samples(run, straight)


@pytest.mark.parametrize(("staleness", "lost"), [(0, "replica"), (2, "replica"), (0, "sessions")])
async def test_what_is_lost_amid_conversations_is_made_up_for(quartet: Quartet, staleness: int, lost: str) -> None:
    """All conversations of a batch wait, and a replica or the process that holds their sessions is killed."""
    run = by_agent(quartet, f"agent-{staleness}-{lost}", "tests.agents:held", loop={"max_staleness": staleness})

    def kill() -> None:
        replica = psutil.Process(next(iter(rollouts(quartet).values())))
        (replica if lost == "replica" else named(quartet, "ray::SessionHolder")).kill()

    await finish_held(run, BATCH, kill)
    assert "interrupted (" not in run.log.read_text()
    lines = read_metrics(run.folder / "metrics.jsonl")
    assert all(line["policy/staleness"] <= staleness for line in lines)
    assert max(line["mismatch/present_mean_abs"] for line in lines if "mismatch/present_mean_abs" in line) < 1e-5
    used = [number for columns in journal(run) for number in columns["number"].tolist()]
    assert sorted(used) == sorted({*used})
    assert len(used) == STEPS * BATCH
    for columns in journal(run):
        check_conversations(columns)


async def test_conversations_of_several_sequences_are_one_sample_each(quartet: Quartet) -> None:
    run = with_labels(quartet, "agent-rewrites", agent=REWRITING)
    run.finish()
    lines, steps = read_metrics(run.folder / "metrics.jsonl"), journal(run)
    assert all(line["mismatch/max_abs"] < 1e-4 for line in lines)
    for columns, line in zip(steps, lines, strict=True):
        assert columns.begins is not None
        sequences = np.add.reduceat(columns.begins, columns.starts, dtype=int) + 1
        # One question, or five in three histories.
        assert (3, 5) in (shapes := {*zip(sequences.tolist(), columns["turn"].tolist(), strict=True)})
        assert shapes <= {(1, 1), (3, 5)}
        assert (line["sequences/mean"], line["turns/mean"]) == (sequences.mean(), columns["turn"].mean())
    first = steps[0]
    # The reference is the policy of the first step.
    assert np.abs(first["logprobs"] - first["ref_logprobs"]).max() < 1e-4
    scores = await quartet.services.reward.score(first.last_sequences(), timeout_s=60)
    earned = np.where(first["turn"] == 5, 0.5, 0)
    assert np.abs(scores.columns[SCORE] + earned - first["score"]).max() < 1e-5
    for row, rewards in enumerate(first.rows("turn_rewards")):
        # At the last token of the first response.
        assert np.flatnonzero(rewards).tolist() == ([len(first.segments(row)[0]) - 1] if earned[row] else [])
    assert lines[0]["reward/turns"] == pytest.approx(earned.mean())
    values, alone = [
        (await quartet.critic.values(columns, timeout_s=60)).values
        for columns in (first, Columns.of(first.ids, first.sequence_lengths, first.sampled))
    ]
    assert np.abs(values - alone).max() < 1e-5
