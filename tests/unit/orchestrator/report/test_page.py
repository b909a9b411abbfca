"""The page of a report: its parts, what it refers to, and files of a run that are not as they should be."""

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.report.comparison import read_comparison
from orchestrator.report.page import write_report
from orchestrator.report.svg import PALETTE, shortened
from quartet.config.base import ConfigError
from tests.unit.runs_on_disk import evaluate, full_run, measure, printed, sample

HOSTILE = '<script>alert(1)</script></pre><img src="http://evil.test/x" onerror=alert(2)> & "quoted"'


class Page(HTMLParser):
    """Tags, their attributes, and the visible text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of which everything was recorded but a trace."""
    run = full_run(tmp_path_factory.mktemp("report") / "demo")
    assert write_report(run) == run / "report.html"
    return run / "report.html"


def test_the_page_holds_every_part_and_refers_to_nothing_outside(path: Path) -> None:
    page = Page(path)
    assert "The last steps" not in page.text
    for heading in (
        "demo",
        "Result",
        "Learning",
        "Policy",
        "Value function",
        "Time",
        "Who worked and who waited",
        "Samples",
        "Configuration",
    ):
        assert heading in page.text
    # Twenty-two charts; 3 steps of 30 seconds; metrics of step 3, at 1.7e9 + 3 seconds, are the last.
    assert page.tags["svg"] == page.tags["figure"] == 22
    assert "3 steps · 1 min 30 s · 14 November 2023, 22:13 UTC" in page.text
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0
    assert "http://" not in path.read_text()
    assert "https://" not in path.read_text()
    references = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert references
    assert all(value.startswith("#") for value in references)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_ids_are_unique_and_every_reference_to_one_is_answered(path: Path) -> None:
    ids = Counter(value for name, value in Page(path).attributes if name == "id")
    assert max(ids.values()) == 1
    used = set(re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', path.read_text()))
    assert {one or other for one, other in used} <= ids.keys()


def test_colours_are_variables_that_the_page_defines_for_both_schemes(path: Path) -> None:
    style, body = path.read_text().split("</style>", 1)
    assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r'(url\(|href="|id=")#?\w+', "", body))
    light, dark = style.split("prefers-color-scheme: dark")
    used = set(re.findall(r"var\((--\w+)\)", body))
    assert {"--blue", "--ink", "--muted", "--grid"} <= used
    for name in used | {f"--{colour}" for colour in PALETTE}:
        assert f"{name}: #" in light
        assert f"{name}: #" in dark


def test_a_full_disk_is_named_by_the_page(tmp_path: Path) -> None:
    measure(tmp_path, [{"step": 0, "eval/score": 0.5}])
    page = tmp_path / "report.html"
    page.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        write_report(tmp_path)
    assert raised.value.filename == str(page)


def test_text_written_by_a_model_stays_text(tmp_path: Path) -> None:
    run = tmp_path / "<b>run"
    measure(run, [{"step": 0, f"eval/{HOSTILE}": 0.5}])
    hostile = {"prompt": HOSTILE, "response": HOSTILE, "judges": {HOSTILE: 0.5}}
    evaluate(run, 0, [sample(0, **hostile), sample(1, **hostile)])
    evaluate(run, 1, [sample(0, **hostile), sample(1, **hostile)])
    (run / "config.yaml").write_text(HOSTILE)
    (run / "run.log").write_text(HOSTILE)
    page = Page(write_report(run))
    assert page.tags["script"] == page.tags["img"] == page.tags["b"] == 0
    assert not any(name.startswith("on") for name, _ in page.attributes)
    # Two samples with prompt and two responses each, a row of the table, the facts of four responses, the log and the
    # configuration; and a legend, which has room for its ends.
    assert page.text.count(HOSTILE) == 2 * 3 + 1 + 4 + 2
    assert page.text.count(shortened(HOSTILE)) == 1
    assert "<b>run" in page.text


def test_names_stay_text_in_the_terminal(tmp_path: Path) -> None:
    evaluate(tmp_path, 0, [sample(0, judges={"[red]gold": 1.0})])
    assert "[red]gold" in printed(tmp_path)


def test_what_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    measure(tmp_path, [{"step": 1, "score/mean": 0.5, "policy/sampled_entropy": None}])
    page = Page(write_report(tmp_path))
    assert page.tags["svg"] == 1
    assert "Score" in page.text
    for absent in ("Result", "Samples", "Configuration", "Entropy", "Judges", "Value function"):
        assert absent not in page.text
    measure(tmp_path, [])
    assert "Nothing was recorded." in Page(write_report(tmp_path)).text


def test_a_number_that_a_sample_lacks_is_left_out(tmp_path: Path) -> None:
    measure(tmp_path, [{"step": 0, "eval/length": 10.0}])
    for step in (0, 2):
        evaluate(tmp_path, step, [sample(0, kl=None, score=None, scores={"right": None, "brief": 1.0})])
    page = write_report(tmp_path).read_text()
    assert '<p class="note">brief 1.00 · 10 tokens</p>' in page
    assert "nan" not in page
    done = CliRunner().invoke(app, ["report", "--samples", "1", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "nan" not in done.output


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics.jsonl: no such file; is .* the folder of a run\?"):
        write_report(tmp_path)
    evaluate(tmp_path, 0, [sample(0), {"row": 1}])
    with pytest.raises(ConfigError, match=r"step-000000.jsonl, line 2: not a sample of an evaluation"):
        read_comparison(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff\xfe", "not valid JSON: "),
        (b'{"row": 1, "prom', "not valid JSON: "),
        (b"[1]", "should be a JSON object, got [1]"),
        (b'{"row": 1}', "prompt: required"),
        (json.dumps(sample("1")).encode(), "row: should be a whole number, got '1'"),  # type: ignore[arg-type]
        (json.dumps(sample(1, response=None)).encode(), "response: should be text, got null"),
        (json.dumps(sample(1, score="high")).encode(), "score: should be a number or null, got 'high'"),
        (json.dumps(sample(1, ended=1)).encode(), "ended: should be true or false, got 1"),
        (json.dumps(sample(1, judges=[])).encode(), "judges: should be a mapping of names to numbers, got []"),
        (json.dumps(sample(1, judges={"a": "b"})).encode(), "judges.a: should be a number or null, got 'b'"),
    ],
)
def test_a_line_that_no_evaluation_writes_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    evaluate(tmp_path, 0, [sample(0)])
    path = tmp_path / "evaluations" / "step-000000.jsonl"
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ConfigError) as caught:
        read_comparison(tmp_path)
    assert str(caught.value).startswith(f"{path}, line 2: not a sample of an evaluation: {message}")


def test_files_that_are_not_named_by_a_step_are_not_evaluations(tmp_path: Path) -> None:
    full_run(tmp_path)
    for name in ("step-final.jsonl", "step-.jsonl", "step-1-2.jsonl"):
        (tmp_path / "evaluations" / name).write_bytes(b"\xff")
    comparison = read_comparison(tmp_path)
    assert comparison is not None
    assert comparison.after is not None
    assert (comparison.before.step, comparison.after.step) == (0, 10)


def test_a_configuration_that_is_not_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    full_run(tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"name: \xff demo")
    assert "name: \ufffd demo" in Page(write_report(tmp_path)).text


def test_measures_compare_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    evaluate(tmp_path, 0, [sample(0, score=0.0), sample(1, score=2.0, ended=False), sample(2, score=1.0)])
    evaluate(tmp_path, 5, [sample(0, score=100.0)])
    # In another order; row 0 wins, row 1 ties, row 2 loses.
    evaluate(tmp_path, 20, [sample(2, score=0.5), sample(1, score=2.0), sample(0, score=2.0, length=16)])
    comparison = read_comparison(tmp_path)
    assert comparison is not None
    assert comparison.after is not None
    assert (comparison.before.step, comparison.after.step) == (0, 20)
    score, kl, length, truncated = comparison.measures()
    assert score.name == "held-out score"
    assert score.before is not None
    assert score.after is not None
    assert score.change is not None
    assert score.wins is not None
    assert (score.before.mean, score.after.mean, score.change.mean) == (1.0, 1.5, 0.5)
    assert score.wins.mean == 0.5
    # Before, s = 1 and n = 3: half the width is 4.30265 / sqrt(3).
    assert score.before.high == pytest.approx(1 + 2.484138, abs=1e-4)
    # Differences 2, 0, -0.5 have s = sqrt(1.75) = 1.322876: 4.30265 · 1.322876 / sqrt(3) = 3.286206.
    assert score.change.high == pytest.approx(0.5 + 3.286206, abs=1e-4)
    assert kl.wins is None
    assert length.after is not None
    assert length.after.mean == 12.0
    assert truncated.before is not None
    assert truncated.before.mean == pytest.approx(100 / 3)
