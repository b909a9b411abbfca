"""The loop of a run that leaves the reference or the critic out."""

from pathlib import Path
from typing import Any

from tests.unit.fake_run import Stage
from tests.unit.step_metrics import STEP_METRICS, steady


async def test_a_run_without_a_reference_asks_for_none_and_measures_no_kl(policy_folder: Path) -> None:
    algorithm = {"minibatch_size": 1, "kl": {"coef": 0}, "scale": "none"}
    with_one = Stage(policy_folder, algorithm=algorithm)
    without = Stage(policy_folder, algorithm=algorithm, services={"reference": None})
    for stage in (with_one, without):
        await stage.run()
    assert "logprobs" not in without.journal.names()
    assert [batch.ref_logprobs for batch, _ in without.policy.batches] == [None] * 3
    assert steady(with_one.log.lines[1]) - steady(without.log.lines[1]) == {"kl/reference"}
    for (batch, _), (other, _) in zip(without.policy.batches, with_one.policy.batches, strict=True):
        assert [row.tolist() for row in batch.advantages] == [row.tolist() for row in other.advantages]


async def test_a_run_without_a_critic_trains_the_policy_alone(policy_folder: Path) -> None:
    algorithm = {"minibatch_size": 1, "kind": "rloo", "samples_per_prompt": 2, "scale": "none"}
    stage = Stage(policy_folder, batch_size=4, algorithm=algorithm, services={"critic": None})
    await stage.run()
    assert {"values", "train critic"}.isdisjoint(stage.journal.names())
    assert [state.first_critic_step for state in stage.checkpoints.states] == [None] * 4
    measured = steady(stage.log.lines[1])
    assert measured >= {name for name in STEP_METRICS - {"work/critic"} if not name.startswith("value/")}
    assert not [name for name in measured if name.startswith("value/") or name == "work/critic"]
    # Two prompts a step, two responses to each, which are the same and so neither better nor worse than the other.
    for batch, _ in stage.policy.batches:
        tokens = [int(prompt[0]) for prompt in batch.prompts]
        assert tokens[::2] == tokens[1::2]
        assert sorted(tokens[::2]) == [10, 11]
        assert [row.tolist() for row in batch.advantages] == [[0.0] * len(row) for row in batch.responses]


async def test_a_run_without_a_critic_goes_on_from_its_journal(policy_folder: Path) -> None:
    section: dict[str, Any] = {
        "algorithm": {"minibatch_size": 1, "kind": "reinforce++"},
        "services": {"critic": None},
    }
    straight, again = Stage(policy_folder, **section), Stage(policy_folder, **section)
    await straight.run()
    again.experience.kept = {step: straight.experience.kept[step] for step in (1, 2)}
    await again.run()
    assert again.journal.names().count("generate") == 1
    for (batch, seed), (other, its) in zip(again.policy.batches, straight.policy.batches, strict=True):
        assert ([row.tolist() for row in batch.advantages], seed) == ([row.tolist() for row in other.advantages], its)
