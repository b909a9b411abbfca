"""A run whose scorer gives a process reward: each part is kept at the token that earned it."""

from orchestrator.monitoring.metrics import read_metrics
from quartet.columns import Columns
from tests.cluster import Quartet
from tests.models import WORDS
from tests.runs import Run, journal

STEPS = 3


def worth(token: int) -> float:
    """The reward of a token by tests.scorers.odd_words: an odd word's number."""
    word = WORDS[token]
    return float(word[1:]) if word.startswith("w") and int(word[1:]) % 2 else 0.0


def check(columns: Columns) -> None:
    for row, response in enumerate(columns.responses):
        own = [worth(token) for token in response.tolist()]
        assert columns.rows("process_rewards")[row].tolist() == own
        assert columns["score"][row] == 10 + sum(own)


def test_each_part_of_a_score_is_kept_where_it_was_earned(quartet: Quartet) -> None:
    scorer = {"kind": "function", "function": "tests.scorers:odd_words", "process": True}
    with quartet.scoring("process", scorer=scorer) as application:
        run = Run(quartet, "process")
        with run.changing() as raw:
            raw["applications"].append(application)
            raw["orchestrator"] |= {"steps": STEPS, "services": {"reward": {"application": "process"}}}
            raw["orchestrator"]["sampling"] |= {"min_new_tokens": 2}
            raw["orchestrator"]["algorithm"]["kl"] = {"coef": 0.0}
        run.finish()
    lines, kept = read_metrics(run.folder / "metrics.jsonl"), journal(run)
    assert len(lines) == len(kept) == STEPS
    for line, columns in zip(lines, kept, strict=True):
        check(columns)
        assert line["reward/process"] > 0
        assert abs(line["reward/process"] - columns["process_rewards"].sum() / len(columns)) < 1e-3
