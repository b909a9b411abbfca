"""Identities of the services: kept with a run, compared when it goes on, accepted when that is asked for."""

from pathlib import Path
from typing import Any

import pytest

from examples.second_try import SecondTry
from orchestrator.clients import Infos
from orchestrator.commands.beginning import first_state, resumed_state
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.loop.identities import identities, user_identities
from orchestrator.loop.state import TrainState
from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from quartet.config.base import ConfigError
from tests.unit.fakes import make_config, make_prompts


def model(name: str) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(name=name, model_hash=f"{name}-{'0' * 40}", tokenizer_hash="words" + "0" * 40)


def scorer(name: str, digest: str, **fields: Any) -> reward_pb2.ScorerIdentity:
    return reward_pb2.ScorerIdentity(name=f"model:{name}", model_hash=digest + "0" * 40, **fields)


def infos(
    reward: reward_pb2.ScorerIdentity | None = None,
    reference: str = "policy",
    with_critic: bool = True,
    scored: common_pb2.ModelInfo | None = None,
) -> Infos:
    return Infos(
        rollout_pb2.RolloutInfo(model=model("policy"), policy_version=6),
        reward_pb2.ScorerInfo(model=scored or model("policy"), identity=reward or scorer("judge", "abc")),
        reference_pb2.ReferenceInfo(model=model(reference)),
        critic_pb2.CriticInfo(model=model("critic"), last_step=4) if with_critic else None,
    )


@pytest.fixture
def kept(policy_folder: Path) -> TrainState:
    """The state of a run that began with these services, as a checkpoint has it."""
    notes: list[str] = []
    state = first_state(make_config(policy_folder), infos(), identities(infos()), notes.append)
    assert (state.policy_version, state.critic_step) == (7, 4)
    [trained] = notes
    assert all(words in trained for words in ("4 steps", "`quartet up`", "`serve deploy`"))
    return TrainState.model_validate_json(state.model_dump_json())


def resume(state: TrainState, now: Infos, accept: bool = False) -> tuple[TrainState, list[str]]:
    notes: list[str] = []
    return resumed_state(state, identities(now), accept=accept, note=notes.append), notes


def test_the_same_services_are_not_news(kept: TrainState) -> None:
    assert resume(kept, infos()) == (kept, [])


def test_another_reward_model_is_an_error_that_says_what_it_was_and_is(kept: TrainState) -> None:
    with pytest.raises(ConfigError) as caught:
        resume(kept, infos(scorer("stricter", "def")))
    first, last = str(caught.value).splitlines()
    assert first == (
        "reward.scorer: model:judge (abc000000000) when the checkpoint was taken, model:stricter (def000000000) now"
    )
    assert "--accept-changed-services" in last
    assert "other services or another environment" in last


def test_every_change_is_told_and_a_new_path_of_the_same_model_is_none(kept: TrainState) -> None:
    with pytest.raises(ConfigError) as caught:
        resume(kept, infos(scorer("judge", "def"), reference="other"))
    places = [line.split(":")[0] for line in str(caught.value).splitlines()[:-1]]
    assert places == ["reference.model", "reward.scorer"]
    assert resume(kept, infos(scorer("moved/judge", "abc")))[1] == []
    # Of the reward service only the tokenizer is, as its scorers have identities of their own.
    assert resume(kept, infos(scored=model("another")))[1] == []
    other = common_pb2.ModelInfo(name="policy", model_hash=model("policy").model_hash, tokenizer_hash="other")
    with pytest.raises(
        ConfigError, match=r"^reward.tokenizer: policy \(words0000000\) when .*, policy \(other\) now"
    ):
        resume(kept, infos(scored=other))


def test_accepted_changes_are_told_and_are_what_the_next_checkpoint_holds(kept: TrainState) -> None:
    now = infos(scorer("stricter", "def"))
    state, notes = resume(kept, now, accept=True)
    assert [note.split(":")[:2] for note in notes] == [["accepted", " reward.scorer"]]
    assert resume(state, now) == (state, [])
    assert state.model_copy(update={"services": kept.services}) == kept


def test_a_run_that_loses_or_gains_a_critic_says_so(policy_folder: Path, kept: TrainState) -> None:
    now = infos(with_critic=False)
    without = first_state(make_config(policy_folder), now, identities(now), print)
    assert (without.first_critic_step, without.critic_step) == (None, None)
    assert TrainState.model_validate_json(without.model_dump_json()) == without
    with pytest.raises(ConfigError, match=r"critic.model: critic \(.*\) when the checkpoint was taken, nothing now"):
        resume(kept, infos(with_critic=False))
    # Leaving it behind may be accepted; the training of one that never was cannot be restored.
    assert resume(kept, infos(with_critic=False), accept=True)[0].critic_step is None
    with pytest.raises(ConfigError, match=r"critic.model: nothing when the checkpoint was taken, critic \("):
        resume(without, infos())
    with pytest.raises(
        ConfigError, match=r"algorithm.kind: this one takes a critic's values, and the checkpoint is of a"
    ):
        resume(without, infos(), accept=True)


def test_several_scorers_are_compared_part_by_part_with_the_names_of_their_scores(kept: TrainState) -> None:
    def several(second: str, *names: str) -> Infos:
        parts = [scorer("a", "a"), scorer("b", second)]
        return infos(reward_pb2.ScorerIdentity(name="several", names=names or ["one", "other"], parts=parts))

    state, _ = resume(kept, several("b"), accept=True)
    assert resume(state, several("b"))[1] == []
    with pytest.raises(ConfigError, match=r"^reward.scorer.parts.1: model:b \(b0+\) .*, model:b \(c0+\)"):
        resume(state, several("c"))
    with pytest.raises(ConfigError, match=r"^reward.scorer: several of one, other .*, several of other, one"):
        resume(state, several("b", "other", "one"))
    with pytest.raises(ConfigError, match=r"reward.scorer.parts.0: model:a .* nothing now"):
        resume(state, infos())


def test_another_environment_is_an_error_as_another_model_is(policy_folder: Path) -> None:
    class Other(SecondTry):
        identity = "another"

    before = identities(infos()) | user_identities(SecondTry())
    state = first_state(make_config(policy_folder), infos(), before, print)
    assert resumed_state(state, before, accept=False, note=print) == state
    for now in (
        identities(infos()) | user_identities(Other()),
        identities(infos()) | user_identities(None),
    ):
        with pytest.raises(
            ConfigError, match=r"^environment: examples.second_try:SecondTry \(.* when the checkpoint"
        ):
            resumed_state(state, now, accept=False, note=print)
        assert resumed_state(state, now, accept=True, note=print).services == now


def test_scores_of_another_scorer_are_not_taken_from_the_journal(tmp_path: Path, policy_folder: Path) -> None:
    from tests.unit.orchestrator.experience.test_journal import PROMPTS, collected, prompt

    def journal(now: Infos) -> ExperienceJournal:
        known = {place: identity.digest for place, identity in identities(now).items()}
        return ExperienceJournal(tmp_path, make_config(policy_folder), services=known)

    assert [prompt.row for prompt in PROMPTS] == [prompt.row for prompt in make_prompts(len(PROMPTS))]
    journal(infos()).write(1, collected())
    assert journal(infos()).read(1, prompt)
    assert journal(infos(scorer("stricter", "def"))).read(1, prompt) is None
    assert journal(infos(scorer("judge", "abc"))).read(1, prompt)
