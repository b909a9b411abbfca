"""Runs with an environment of two turns, one file of examples/: what is trained, and what survives faults."""

import shutil
from pathlib import Path

import psutil
import pytest

from examples.second_try import WRONG
from orchestrator.monitoring.metrics import read_metrics
from quartet.columns import Columns
from tests.cluster import Quartet, rollouts
from tests.commands import PATIENCE_S
from tests.models import EOS, make_tokenizer
from tests.runs import Run, finish_held, journal, write_rows

STEPS, BATCH, LEAST, MOST = 3, 16, 3, 12
TOLD = make_tokenizer()(WRONG, add_special_tokens=False)["input_ids"]
BEGIN = 5
TEMPLATE = f"{{% for m in messages %}}{{{{ m['content'] }}}} <eos> {{% endfor %}}w{BEGIN}"
"""Ends each message with EOS; `w5` begins a response."""


def two_turns(quartet: Quartet, name: str, environment: str, **loop: int) -> Run:
    """A run with few tokens a turn, whose prompts have labels that some first responses hold."""
    run = Run(quartet, name)
    rows = [{"prompt": f"w{4 + row} w{5 + row}", "label": f"w{4 + row % 60}"} for row in range(40)]
    prompts = write_rows(quartet, "labelled.jsonl", rows)
    policy = quartet.folder / "with-template"
    if not policy.exists():
        shutil.copytree(quartet.policy, policy)
        (policy / "chat_template.jinja").write_text(TEMPLATE)
    with run.changing() as raw:
        raw["orchestrator"]["policy"]["model"] = str(policy)
        raw["orchestrator"] |= {
            "steps": STEPS,
            "data": {"path": str(prompts), "label_key": "label", "max_prompt_length": 16},
            "sampling": {"max_new_tokens": MOST, "min_new_tokens": LEAST},
            "environment": {"kind": environment, "answer_s": 240},
            "loop": {"max_staleness": 0} | loop,
        }
    return run


def check_conversations(columns: Columns, *, rendered: bool = False) -> int:
    """Checks each conversation of a step; returns the number of those with two turns. `rendered`: the chat template
    wrote the answers."""
    numbers = columns["number"].tolist()
    assert numbers == sorted({*numbers})
    assert len(numbers) == BATCH
    second = 0
    for row in range(len(columns)):
        parts = [part.tolist() for part in columns.segments(row)]
        assert len(parts) in (1, 3)
        responses = parts[::2]
        for answer in parts[1::2]:
            # The template's end of a turn is there where the response brought none.
            end = [] if responses[0][-1] == EOS else [EOS]
            assert answer == ([*end, *TOLD, EOS, BEGIN] if rendered else TOLD)
        # Exactly the responses count as sampled, each with its least length, an end only as its last token.
        assert columns.counts[row] == sum(map(len, responses))
        for response in responses:
            assert LEAST <= len(response) <= MOST
            assert EOS not in response[:-1]
            assert EOS not in response[:LEAST]
        label = 4 + int(columns["row"][row]) % 60
        assert (label in responses[0]) is (len(parts) == 1)
        second += len(parts) == 3
    assert len({tuple(ids.tolist()) for ids in columns.responses}) == BATCH
    return second


@pytest.fixture(scope="module")
def straight(quartet: Quartet) -> Run:
    """A run that nothing happened to."""
    run = two_turns(quartet, "second-try", "examples.second_try:SecondTry")
    run.finish()
    return run


def test_what_was_sampled_is_trained_on_and_what_the_environment_said_is_not(straight: Run) -> None:
    lines = read_metrics(straight.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    # The learner's log-probs are the engine's in both turns, also where an end had to wait for the least length.
    assert all(line["mismatch/max_abs"] < 1e-4 for line in lines)
    steps = journal(straight)
    assert [number for columns in steps for number in columns["number"].tolist()] == list(range(STEPS * BATCH))
    second = [check_conversations(columns) for columns in steps]
    assert all(0 < count < BATCH for count in second)
    for line, columns in zip(lines, steps, strict=True):
        assert line["response/length_mean"] == pytest.approx(float(columns.counts.mean()))
        assert line["samples/used"] == BATCH


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_replica_that_dies_between_two_turns_takes_nothing_with_it(quartet: Quartet, staleness: int) -> None:
    """All conversations of a batch wait for their second turn, and a replica is killed meanwhile."""
    run = two_turns(quartet, f"held-{staleness}", "tests.environments:Held", max_staleness=staleness)
    await finish_held(run, BATCH, lambda: psutil.Process(next(iter(rollouts(quartet).values()))).kill())
    assert "interrupted (" not in run.log.read_text()
    lines = read_metrics(run.folder / "metrics.jsonl")
    assert lines[-1]["samples/used_total"] == STEPS * BATCH
    assert all(line["policy/staleness"] <= staleness for line in lines)
    # Of tokens that the present weights sampled.
    assert max(line["mismatch/present_mean_abs"] for line in lines if "mismatch/present_mean_abs" in line) < 1e-5
    used = [number for columns in journal(run) for number in columns["number"].tolist()]
    assert sorted(used) == sorted({*used})
    assert sum(check_conversations(columns, rendered=True) for columns in journal(run)) > 0
    if not staleness:
        # Nothing of the first turns was sampled again: each was answered once.
        assert sorted(used) == list(range(STEPS * BATCH))


def test_an_environment_that_fails_ends_the_run_with_its_reason(quartet: Quartet) -> None:
    (quartet.folder / "fails_here.py").write_text(
        "from examples.second_try import SecondTry\n\n\n"
        "class Fails(SecondTry):\n"
        "    def answer(self, turn):\n"
        "        raise OSError('the tool is gone')\n"
    )
    run = two_turns(quartet, "fails", "fails_here:Fails")
    process = run.start()
    try:
        assert process.wait(PATIENCE_S) == 1
        told = " ".join(run.log.read_text().split())
        assert "error: environment fails_here:Fails: sample" in told
        assert "failed with OSError('the tool is gone') at line 6 of fails_here, the last of 3 attempts" in told
        assert "interrupted (" not in told
        assert run.steps() == []
    finally:
        run.end()
        Path(quartet.folder / "fails_here.py").unlink()
