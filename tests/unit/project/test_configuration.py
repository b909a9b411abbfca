"""docs/configuration.md is what the configuration's docstrings say."""

import re

import pytest

from orchestrator.algorithms.registry import presets
from quartet.config.limits import LimitsConfig
from services.critic.config import CriticConfig
from services.rollout.config import RolloutConfig
from tests.lint.configuration import PAGE, page


def test_the_page_is_made_from_the_docstrings() -> None:
    assert PAGE.read_text() == page(), "run `make configuration-page`"


def test_every_section_and_key_is_there_once() -> None:
    text = page()
    for key in ("| `learning_rate` |", "### `orchestrator.weights`", "### `services.reward.scorer` of kind several"):
        assert key in text
    titles = [line for line in text.splitlines() if line.startswith("##")]
    assert len(titles) == len(set(titles))


def test_no_two_sections_refer_to_each_other_and_no_table_is_empty() -> None:
    text = page()
    assert "|---|---|---|\n\n" not in text
    assert "| `target` |" in section(text, "### `orchestrator.services.rollout`")
    assert "As in `orchestrator.services.rollout`: `target`" in section(text, "### `orchestrator.services.reward`")


@pytest.mark.parametrize(
    ("title", "key", "defaults"),
    [
        ("## Service rollout", "limits", RolloutConfig.model_fields["limits"].default),
        ("## Service critic", "limits", CriticConfig.model_fields["limits"].default),
        ("## Service critic", "train_limits", CriticConfig.model_fields["train_limits"].default),
    ],
)
def test_defaults_of_a_section_in_one_place_are_told_there(title: str, key: str, defaults: LimitsConfig) -> None:
    [row] = re.findall(rf"^\| `{key}` .*$", section(page(), title), re.MULTILINE)
    usual = LimitsConfig()
    differing = [f"`{name}` {value:.12g}" for name, value in defaults if value != getattr(usual, name)]
    assert differing
    assert row.endswith(f" Other defaults here: {', '.join(differing)}. |")


def test_each_kind_names_its_penalty_where_it_is_not_that_of_ppo() -> None:
    text, usual = page(), presets()["ppo"].kl
    for kind, algorithm in presets().items():
        told = dict(re.findall(r"`kl\.(\w+)` (\S+?)[,.]?(?= |$)", section(text, f"of kind {kind}\n"), re.MULTILINE))
        differing = {name: value for name, value in algorithm.kl if value != getattr(usual, name)}
        assert told == {
            name: f"{value:g}" if isinstance(value, float) else value for name, value in differing.items()
        }


def test_patterns_stand_as_a_file_has_them() -> None:
    assert r"```` (?s)```(?:py(?:thon)?)?[ \t]*\n(.*?)``` ````" in page()
    assert r"`(?i)score[^\w-]{0,5}(-?\d+(?:\.\d+)?)`" in page()


def section(text: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.split(r"^#", text.split(title, 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
