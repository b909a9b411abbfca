"""A run whose policy calls tools, by chance: what it is trained on, what it is told, and the same again."""

import json
import re
import shutil

import pytest

from orchestrator.monitoring.metrics import read_metrics
from quartet.columns import Columns
from tests.cluster import Quartet
from tests.models import EOS, make_tokenizer
from tests.runs import Run, assert_replayed, journal

STEPS, BATCH, LEAST, MOST, TURNS = 3, 16, 3, 12, 3
TEMPLATE = (
    "{% for t in tools or [] %}w6 {{ t.function.name }} {% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}w10 {% endif %}{{ m.content }} {% for c in m.tool_calls or [] %}{{ c.function.name }} "
    "text={{ c.function.arguments.text }} count={{ c.function.arguments.count }} {% endfor %}<eos> {% endfor %}"
    "{% if add_generation_prompt %}w5{% endif %}"
)
CALLS = {
    "open_pattern": r"\b(?P<name>w[789]|find)\b",
    "close_pattern": r"(?=\bw[789]\b)|<eos>|$",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"\b(?P<key>w|text|count)=?(?P<value>\d+|a b)\b"},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    "repeats": True,
}
"""A call is a word and those after it, of which the last is its argument: `w7 w30 w12` is w7(w=12)."""
STOPS = list(range(20, 28))
TOKENIZER = make_tokenizer()


def with_tools(quartet: Quartet, name: str) -> Run:
    run = Run(quartet, name)
    policy = quartet.folder / "with-tools"
    if not policy.exists():
        shutil.copytree(quartet.policy, policy)
        (policy / "chat_template.jinja").write_text(TEMPLATE)
        config = policy / "tokenizer_config.json"
        own = {"response_template": {"start_anchor": "w5", "fields": {"tool_calls": CALLS}}}
        config.write_text(json.dumps(json.loads(config.read_text()) | own))
    with run.changing() as raw:
        raw["orchestrator"]["policy"]["model"] = str(policy)
        raw["orchestrator"]["data"] |= {"chat_template": True, "max_prompt_length": 16}
        raw["orchestrator"] |= {
            "steps": STEPS,
            "sampling": {"max_new_tokens": MOST, "min_new_tokens": LEAST, "stop_token_ids": STOPS},
            "environment": {"kind": "tests.environments:Doubling", "max_turns": TURNS, "max_tokens": 48},
            "loop": {"max_staleness": 0},
        }
    return run


def told(response: list[int]) -> list[str]:
    """Answers to the calls in a response."""
    text = TOKENIZER.decode(response[: -1 if response[-1] == EOS else None], skip_special_tokens=False)
    answers = []
    for name, rest in re.findall(r"\bw([789])\b(.*?)(?=\bw[789]\b|<eos>|$)", text):
        words = [int(word) for word in re.findall(r"\bw(\d+)\b", rest)]
        if name == "9":
            answers.append("error: there is no tool 'w9'; the tools are w7, w8")
        elif not words:
            answers.append("error: w: Missing required argument")
        else:
            answers.append(f"w{2 * words[-1]}" if name == "7" else f"w{words[-1] // 2}")
    return answers


def check(columns: Columns) -> tuple[int, int]:
    """Checks each conversation of a step; returns the numbers of answered calls, and of those that were wrong."""
    calls = wrong = 0
    for row in range(len(columns)):
        prompt, *parts = [part.tolist() for part in (columns.prompts[row], *columns.segments(row))]
        assert prompt[:4] == TOKENIZER("w6 w7 w6 w8", add_special_tokens=False)["input_ids"]
        responses, answers = parts[::2], parts[1::2]
        for response, answer in zip(responses, answers, strict=False):
            texts = told(response)
            rendered = " ".join(f"w10 {text} <eos>" for text in texts) + " w5"
            end = [] if response[-1] == EOS else [EOS]
            assert texts
            assert answer == [*end, *TOKENIZER(rendered, add_special_tokens=False)["input_ids"]]
            calls, wrong = calls + len(texts), wrong + sum(text.startswith("error") for text in texts)
        assert columns["turn"][row] == len(responses) == len(answers) + 1
        last, room = told(responses[-1]), columns["truncated"][row]
        assert len(responses) == TURNS or room or not last
        # The loss is on what was sampled, and on nothing else.
        mask = [flag for part, text in zip(parts, [True, False] * TURNS, strict=False) for flag in [text] * len(part)]
        assert columns.rows("sampled")[row].tolist() == [False] * len(prompt) + mask
    return calls, wrong


@pytest.fixture(scope="module")
def straight(quartet: Quartet) -> Run:
    run = with_tools(quartet, "tools")
    run.finish()
    return run


def test_calls_are_answered_and_only_what_was_sampled_is_trained_on(straight: Run) -> None:
    lines, steps = read_metrics(straight.folder / "metrics.jsonl"), journal(straight)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    found: list[tuple[int, int]] = []
    for line, columns in zip(lines, steps, strict=True):
        # The learner's log-probs of the trained tokens are those with which the engine sampled them, in all turns.
        assert line["mismatch/max_abs"] < 1e-4
        assert line["policy/first_log_ratio_max"] < 1e-4
        found.append(check(columns))
        lost = int(columns["calls"].sum()) - found[-1][0]  # answered, but there was no room for the answers
        assert 0 <= lost <= MOST * int(columns["truncated"].sum())
        assert line["calls/mean"] == pytest.approx(columns["calls"].mean())
        if total := columns["calls"].sum():
            assert line["calls/wrong"] == pytest.approx(columns["wrong_calls"].sum() / total)
        assert line["turns/mean"] == pytest.approx(columns["turn"].mean())
    calls, wrong = map(sum, zip(*found, strict=True))
    assert calls > wrong > 0


def test_the_journal_gives_the_same_weights(quartet: Quartet, straight: Run) -> None:
    again = with_tools(quartet, "tools-again")
    assert_replayed(again, straight)
