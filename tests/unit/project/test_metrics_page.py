"""docs/metrics.md has every metric whose name stands in the code; tests/e2e/test_train.py compares those of a run."""

import re

from tests.configuration import REPO
from tests.pages import told_metrics

FIRST = "calls|eval|group|kl|mismatch|off_policy|policy|prompts|push|response|reward|samples|score|seconds|sequences"
FIRST += "|staleness|task|tokens_per_s|turns|value|wait|work"
WHERE = ("loop", "experience", "evaluation/evaluator.py", "policy", "push")


def test_every_name_in_the_code_is_on_the_page() -> None:
    found = set[str]()
    for place in WHERE:
        path = REPO / "orchestrator" / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found |= set(re.findall(rf'"((?:{FIRST})/[a-z_/{{}}]+)"', file.read_text()))
    assert len(found) > 40
    # The first part of names that are put together, such as f"score/{name}", begins some that are told.
    told = told_metrics()
    names = {re.sub(r"\{\w+\}", "x", name) for name in found}
    parts = {"score/x", "task/x", "seconds/x", "mismatch/x", "off_policy/x", "eval/xx"}
    assert {name for name in names if not told.fullmatch(name)} <= parts


def test_no_metric_is_told_twice() -> None:
    text = (REPO / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| (`.+?) \| ", text, re.MULTILINE)
    names = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    assert len(names) == len(set(names)) > 80
