"""docs/configuration.md is what the configuration's docstrings say."""

from tests.lint.configuration import PAGE, page


def test_the_page_is_made_from_the_docstrings() -> None:
    assert PAGE.read_text() == page(), "run `make configuration-page`"


def test_every_section_and_key_is_there_once() -> None:
    text = page()
    for key in ("| `learning_rate` |", "### `orchestrator.weights`", "### `services.reward.scorer` of kind several"):
        assert key in text
    titles = [line for line in text.splitlines() if line.startswith("##")]
    assert len(titles) == len(set(titles))
