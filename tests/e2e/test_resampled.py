"""A run that samples other prompts in place of those that teach nothing, killed while it does: it ends as one that
was not, bit for bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.loop.checkpoint_folder import latest
from tests.cluster import Quartet
from tests.runs import EVERY, Run, assert_same, journal, write_rows

STEPS, BATCH, EACH, PROMPTS = 4, 16, 2, 400
# One optimizer step a batch and no weights of the engine's rounding: what is trained follows from the tokens alone,
# in whatever company the engine samples them.
DAPO = {
    "kind": "dapo",
    "samples_per_prompt": EACH,
    "epochs": 1,
    "minibatch_size": BATCH,
    "importance_cap": None,
}
APPLICATION = "odd"


@pytest.fixture(scope="module")
def scored(quartet: Quartet) -> Iterator[dict[str, Any]]:
    """A reward application of two scores, so that half of the groups of two have no spread."""
    function = {"kind": "function", "function": "tests.scorers:odd", "pair_timeout_s": 300.0}
    with quartet.scoring(APPLICATION, scorer=function) as application:
        yield application


def resampling(quartet: Quartet, scored: dict[str, Any], name: str) -> Run:
    """A run of kind dapo whose prompts are all different, with the file that holds the scorer up as their label."""
    run = Run(quartet, name, without=["reward", "reference", "critic"])
    hold = str(quartet.folder / "hold-scores")
    texts = (f"w{4 + row % 40} w{4 + row // 40}" for row in range(PROMPTS))
    prompts = write_rows(quartet, "different.jsonl", ({"prompt": text, "label": hold} for text in texts))
    with run.changing() as raw:
        raw["applications"].append(scored)
        raw["orchestrator"] |= {
            "steps": STEPS,
            "batch_size": BATCH,
            "services": {"reward": {"application": APPLICATION}},
            "data": {"path": str(prompts), "label_key": "label", "max_prompt_length": 16},
            "sampling": {"max_new_tokens": 12},
            "algorithm": DAPO,
        }
    return run


def last_prompt(run: Run, step: int) -> str:
    """The prompt of the group that was sampled last of those that the step trained on."""
    columns = journal(run)[step - 1]
    row = int(columns["row"][columns["number"].argmax()])
    lines = Path(run.quartet.folder / "different.jsonl").read_text().splitlines()
    return str(json.loads(lines[row])["prompt"])


def test_a_run_killed_amid_resampling_ends_as_one_that_was_not(quartet: Quartet, scored: dict[str, Any]) -> None:
    """The step is sampled again, by engines that serve other requests beside; its scores were held up until the last
    prompt in place of another was asked for."""
    straight, again = resampling(quartet, scored, "resampled"), resampling(quartet, scored, "resampled-again")
    hold = quartet.folder / "hold-scores"
    held = hold.with_suffix(".held")
    try:
        straight.finish()
        lines = straight.measured()
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert all(line["group/zero_variance"] == 0 and line["policy/grad_norm"] > 0 for line in lines)
        # A step behind a checkpoint, so that the checkpoint has discarded groups behind it too.
        step = next(int(line["step"]) for line in lines if line["step"] > EVERY and line["samples/discarded"])

        again.take_samples(straight, "checkpoints/step-000000")
        hold.write_text(last_prompt(straight, step))
        again.killed(held.exists, "--resume")
        assert again.steps() == list(range(1, step))
        assert not (again.folder / "journal" / f"step-{step:06d}.msgpack").exists()
        hold.unlink()
        again.finish("--resume")
    finally:
        hold.unlink(missing_ok=True)
        for run in (straight, again):
            run.end()
    assert_same(again, straight, but=("mismatch/", "off_policy/"))
    ledgers = [checkpoint.state for run in (straight, again) if (checkpoint := latest(run.folder / "checkpoints"))]
    assert len(ledgers) == 2
    assert ledgers[0] == ledgers[1]
    assert ledgers[0].samples_discarded == sum(line["samples/discarded"] for line in lines) > 0
    assert EACH * len(ledgers[0].prompts_seen) == STEPS * BATCH + ledgers[0].samples_discarded
