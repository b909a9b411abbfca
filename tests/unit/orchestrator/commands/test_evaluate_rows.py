"""`quartet evaluate FILE.jsonl`: responses of others, of an endpoint and of a folder; continued and compared."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator.commands.evaluate_rows import Folder, Results, Wanted, evaluate_rows, fields_of
from orchestrator.commands.offline import OfflineRollout
from orchestrator.evaluation.rows import RowFile
from orchestrator.report.evaluation import write_page
from quartet.config.base import ConfigError
from quartet.wire.errors import Unavailable, leaves
from quartet.wire.outcomes import Outcome, Unscored
from services.rollout.config import RolloutConfig
from tests.unit.openai_endpoint import Asked, Reply, completion, serving
from tests.unit.orchestrator.commands.test_evaluate import ENGINE
from tests.unit.scoring import Scored, Service, length, read, right, write

PROMPTS = [
    {"prompt": "1 + 1 =", "label": "2", "source": "sums"},
    {"prompt": "2 + 3 =", "label": "5", "source": "sums"},
    {"prompt": "say a", "label": "a", "source": "words"},
]


async def run(wanted: Wanted, service: Service, *names: str) -> Results:
    return await evaluate_rows(wanted, lambda: service.hub(*names))


def responses(path: Path, *given: tuple[str, str, str]) -> Path:
    return write(path, *({"prompt": p, "response": r, "source": s} for p, r, s in given))


def by_measure(results: Results, group: str = "") -> dict[str, Any]:
    return {figure.measure: figure for figure in results.figures if figure.group == group}


async def test_responses_of_others_are_scored_by_several_scorers(tmp_path: Path) -> None:
    # Prompt "ab" has two responses: its mean counts once.
    path = responses(
        tmp_path / "a.jsonl",
        ("ab", "a", "x"),
        ("cd", "zz", "y"),
        ("ab", "zzz", "x"),
        ("ef", "?", "y"),
        ("gh", "...", "y"),
    )
    service = Service({"length": length, "right": right})
    wanted = Wanted(path, tmp_path / "out", by=["source"])
    results = await run(wanted, service, "length", "right")
    figure = by_measure(results)["length"]
    assert figure.mean.mean == pytest.approx(((1 + 3) / 2 + 2) / 2)
    assert (figure.scored, figure.prompts, figure.unscored) == (3, 2, {"not_applicable": 1, "timeout": 1})
    assert figure.scorer == {"name": "function:length", "hash": "h" * 64}
    assert by_measure(results)["right"].mean.mean == pytest.approx((0.5 + 0 + 0 + 0) / 4)
    assert by_measure(results, "source=x")["length"].mean.mean == 2
    assert by_measure(results, "source=y")["length"].unscored == {"not_applicable": 1, "timeout": 1}
    rows = read(tmp_path / "out/rows.jsonl")
    assert [row["response"] for row in rows] == ["a", "zz", "zzz", "?", "..."]
    assert [row["scores"]["length"] for row in rows] == [1.0, 2.0, 3.0, None, None]
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["figures"][0]["unscored"] == {"not_applicable": 1, "timeout": 1}
    assert all(figure["scorer"]["hash"] for figure in summary["figures"])
    # Called again, it asks for the score that was too slow, and for nothing else.
    service.judges["length"] = lambda prompt, response: 9.0
    service.asked.clear()
    again = await run(wanted, service, "length", "right")
    assert service.asked == [("length", ["gh"]), ("right", ["gh"])]
    assert by_measure(again)["length"].unscored == {"not_applicable": 1}


async def test_an_evaluation_without_any_score_has_no_mean(tmp_path: Path) -> None:
    path = responses(tmp_path / "a.jsonl", ("ab", "?", "x"), ("cd", "?", "y"))
    results = await run(Wanted(path, tmp_path / "out", pass_at=[1]), Service({"length": length}))
    [figure] = results.figures
    assert (figure.mean, figure.scored, figure.passes) == (None, 0, {})
    assert json.loads((tmp_path / "out/summary.json").read_text())["figures"][0]["mean"] is None
    assert "–" in write_page(tmp_path / "out").read_text()


async def test_an_endpoint_answers_with_several_samples_and_pass_at_k(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", *PROMPTS)

    def answer(asked: Asked) -> Reply:
        # The first prompt is answered rightly once in four, the second always, the third never.
        prompt, seed = asked.body["prompt"], asked.body["seed"]
        said = {"1 + 1 =": "2" if seed % 4 == 0 else "3", "2 + 3 =": "5", "say a": "b"}[prompt]
        return completion(said, policy_version=7 + (seed == 11))

    def correct(prompt: str, response: str) -> Scored:
        return float(response == {"1 + 1 =": "2", "2 + 3 =": "5", "say a": "a", "": ""}[prompt])

    with serving(answer) as (address, asked):
        wanted = Wanted(path, tmp_path / "out", address, "m", samples=4, seed=0, pass_at=[1, 2], at_once=3)
        results = await run(wanted, service := Service({"correct": correct}))
    assert len(asked) == 12
    figure = by_measure(results)["correct"]
    assert figure.mean.mean == pytest.approx((0.25 + 1 + 0) / 3)
    assert figure.passes[1].mean == pytest.approx((0.25 + 1 + 0) / 3)
    assert figure.passes[2].mean == pytest.approx((1 - 3 / 6 + 1 + 0) / 3)
    assert (results.samples, results.versions) == (12, [7, 8])
    remarks = ["12 samples", "weights of version 7 to 8: they changed meanwhile"]
    assert results.remarks() == json.loads((tmp_path / "out/summary.json").read_text())["remarks"] == remarks
    assert " · ".join(remarks) in write_page(tmp_path / "out").read_text()
    rows = read(tmp_path / "out/rows.jsonl")
    assert [(row["prompt"], row["sample"]) for row in rows[:5]] == [
        *(("1 + 1 =", n) for n in range(4)),
        ("2 + 3 =", 0),
    ]
    assert rows[0]["policy_version"] == 7
    assert all(columns["ended"] is True and "source" in columns for columns in service.columns)
    assert rows[0]["ended"] is True


async def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", *({"prompt": f"p{number}"} for number in range(40)))
    answers = 0

    def answer(asked: Asked) -> Reply:
        nonlocal answers
        answers += 1
        return Reply({"error": {"message": "bad key"}}, 401) if answers > 25 else completion(asked.body["prompt"])

    service = Service({"length": length})
    with serving(answer) as (address, asked):
        wanted = Wanted(path, tmp_path / "out", address, at_once=2)
        with pytest.raises(ExceptionGroup) as caught:
            await run(wanted, service)
        assert all("bad key" in str(error) for error in leaves(caught.value))
        # The key is put right.
        answers = -1000
        before = len(asked)
        results = await run(wanted, service)
        again = len(asked) - before
        assert again in (15, 16)  # the answer that was on its way when another was refused may be lost
        prompts = [prompt for _, prompts in service.asked for prompt in prompts]
        assert {*prompts} == {f"p{number}" for number in range(40)}
        assert results.figures[0].scored == 40
        rows = read(tmp_path / "out/rows.jsonl")
        assert [row["response"] for row in rows] == [f"p{number}" for number in range(40)]
        # What was answered and not scored, as the hub failed, is not answered again.
        lines = (tmp_path / "out/journal.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "out/journal.jsonl").write_text("".join(line for line in lines if '"outcomes"' not in line))
        await run(wanted, service)
        assert len(asked) - before == again


async def test_a_changed_setting_is_refused_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", *PROMPTS)
    with serving(lambda asked: completion("x")) as (address, asked):
        wanted = Wanted(path, tmp_path / "out", address, "m", temperature=0.5)
        await run(wanted, Service({"length": length}))
        count = len(asked)
        changes: dict[str, Any] = {
            "--temperature: was 0.5 .* is 1.0 now": {"temperature": 1.0},
            "--model: was 'm' .* is 'other' now": {"model": "other"},
            "--samples: was 1 .* is 2 now": {"samples": 2},
            "--field: was": {"fields": {"top_p": 0.9}},
        }
        for said, change in changes.items():
            with pytest.raises(ConfigError, match=said):
                await run(replace(wanted, **change), Service({"length": length}))
        with pytest.raises(ConfigError, match="--scorer length: was"):
            await run(wanted, Service({"length": length}, {"length": "k" * 64}))
        write(path, *PROMPTS[:2])
        with pytest.raises(ConfigError, match="FILE: was"):
            await run(wanted, Service({"length": length}))
        assert len(asked) == count
        results = await run(replace(wanted, overwrite=True), Service({"length": length}))
        assert results.samples == 2


async def test_prompts_that_are_refused_are_counted_apart_and_never_a_number(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", *PROMPTS)

    def answer(asked: Asked) -> Reply:
        refused = asked.body["prompt"] == "say a"
        return Reply({"error": {"message": "too long"}}, 400) if refused else completion("zz", "length")

    with serving(answer) as (address, asked):
        wanted = Wanted(path, tmp_path / "out", address)
        results = await run(wanted, Service({"length": length}))
        figure = by_measure(results)["length"]
        assert (figure.mean.mean, figure.scored, figure.unscored) == (2.0, 2, {"unanswered": 1})
        assert (results.unanswered, results.cut_off) == (1, 2)
        row = read(tmp_path / "out/rows.jsonl")[2]
        assert row["response"] is None
        assert row["unanswered"] == "status 400: too long"
        assert row["scores"] == {"length": None}
        # It is not asked again.
        await run(wanted, Service({"length": length}))
        assert len(asked) == 3


async def test_an_endpoint_that_fails_again_and_again_ends_the_evaluation(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", *({"prompt": f"p{number}"} for number in range(200)))
    with (
        serving(lambda asked: Reply({"error": {"message": "full"}}, 503)) as (address, _),
        pytest.raises(ExceptionGroup) as caught,
    ):
        await run(Wanted(path, tmp_path / "out", address, timeout_s=0.05), Service({"length": length}))
    assert any(
        isinstance(error, Unavailable) and "in a row have failed" in str(error) for error in leaves(caught.value)
    )


async def test_two_evaluations_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    ours = responses(
        tmp_path / "a.jsonl", *((f"p{number}", "xx" if number < 9 else "x", "s") for number in range(10))
    )
    # In another order, with a prompt that only this one has, and one that it could not score.
    theirs = responses(
        tmp_path / "b.jsonl",
        ("only b", "xxxx", "s"),
        *((f"p{number}", "x" if number != 4 else "?", "s") for number in reversed(range(10))),
    )
    service = Service({"length": length})
    await run(Wanted(theirs, tmp_path / "b"), service)
    results = await run(Wanted(ours, tmp_path / "a", against=tmp_path / "b"), service)
    compared = results.figures[0].against
    assert compared is not None
    assert (compared.prompts, compared.better, compared.worse) == (9, 8, 0)
    assert compared.wins.mean == pytest.approx((8 + 0.5) / 9)
    assert compared.p == pytest.approx(2 / 2**8)
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert summary["figures"][0]["against"]["ties"] == 1
    assert summary["settings"]["--against"] == str(tmp_path / "b")
    page = write_page(tmp_path / "a").read_text()
    assert "win rate" in page
    assert "p = 0.00781" in page
    # Scores of two scorers are not compared.
    other = Service({"length": length}, {"length": "k" * 64})
    with pytest.raises(ConfigError, match=r"--against .*: scorer length: function:length hhhhhhhhhhhh there, and"):
        await run(Wanted(ours, tmp_path / "c", against=tmp_path / "b"), other)
    with pytest.raises(ConfigError, match="--against: no such file"):
        await run(Wanted(ours, tmp_path / "c", against=tmp_path / "nothing"), service)


async def test_chats_of_others_are_paired_by_their_messages(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}]
    whole = write(tmp_path / "a.jsonl", {"messages": [*talk, {"role": "assistant", "content": "longer"}]})
    apart = write(tmp_path / "b.jsonl", {"prompt": talk, "response": "short"})
    service = Service({"length": length})
    await run(Wanted(apart, tmp_path / "b"), service)
    results = await run(Wanted(whole, tmp_path / "a", against=tmp_path / "b"), service)
    assert results.figures[0].against is not None
    assert results.figures[0].against.better == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "m", "endpoint": "http://127.0.0.1:9/v1"}, "line 1: response: is there already"),
        ({"by": ["colour"]}, "line 1: colour: required by --by; there are prompt, response, source"),
        ({"samples": 2}, "--samples: the rows hold the responses"),
        (
            {"temperature": 0.0, "chat": True, "fields": {"top_p": 1}},
            "--chat, --temperature, --field: for a model that answers; give --endpoint or --model too",
        ),
        ({"file": Path("nothing.jsonl")}, "nothing.jsonl: no such file"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = responses(tmp_path / "a.jsonl", ("p", "r", "s"))
    with pytest.raises(ConfigError, match=re.escape(said)):
        await run(replace(Wanted(path, tmp_path / "out"), **change), Service({"length": length}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("column", ["sample", "ended", "policy_version", "unanswered"])
async def test_columns_that_an_answer_fills_are_refused_with_one_and_kept_without(
    tmp_path: Path, column: str
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "p", column: "mine"})
    with pytest.raises(ConfigError, match=f"line 1: {column}: would be overwritten, as it is filled; rename it"):
        await run(Wanted(path, tmp_path / "out", model="m", by=[column]), Service({"length": length}))
    write(path, {"prompt": "p", "response": "r", column: "mine"})
    await run(Wanted(path, tmp_path / "out"), Service({"length": length}))
    assert read(tmp_path / "out/rows.jsonl")[0][column] == "mine"


async def test_what_utf_8_cannot_write_costs_no_summary_and_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"role": "user", "content": "\ud800 said"}]
    path = write(tmp_path / "a.jsonl", {"prompt": talk, "response": "r", "source": "\udfff"})
    results = await run(Wanted(path, tmp_path / "out", by=["source"]), Service({"length": length}))
    summary = json.loads((tmp_path / "out/summary.json").read_bytes())
    assert summary["figures"][1]["group"] == "source=\udfff"
    page = write_page(tmp_path / "out").read_text()
    assert "user: ? said" in page
    drawn = Console(width=200)
    drawn.print(results.table())
    assert "source=?" in capsys.readouterr().out


async def test_the_page_shows_scores_and_reasons_of_others_as_they_are(tmp_path: Path) -> None:
    theirs = {
        "scores": {"human": "good", "x": 2, "y": [1]},
        "reasons": {"human": "<b>", "z": 5},
        "outcomes": {"z": 1},
    }
    path = write(tmp_path / "a.jsonl", {"prompt": "p", "response": "r"} | theirs)
    await run(Wanted(path, tmp_path / "out"), Service({"length": length}))
    page = write_page(tmp_path / "out").read_text()
    for text in ("human good · x 2 · y [1] · length 1", "human: &lt;b&gt; · z: 1, 5"):
        assert text in page


async def test_columns_of_too_many_values_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": "p", "response": "r", "source": n} for n in range(65)))
    service = Service({"length": length})
    with pytest.raises(ConfigError, match="line 65: --by source: has more than 64 different values"):
        await run(Wanted(path, tmp_path / "out", by=["source"]), service)
    assert service.asked == []
    assert not (tmp_path / "out").exists()


async def test_prompts_alone_need_someone_who_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", *PROMPTS)
    with pytest.raises(ConfigError, match="line 1: response: required, unless --endpoint or --model answers"):
        await run(Wanted(path, tmp_path / "out"), Service({"length": length}))
    with pytest.raises(ConfigError, match="--pass-at 3: needs as many --samples or more, got 2"):
        await run(Wanted(path, tmp_path / "out", model="m", samples=2, pass_at=[3]), Service({"length": length}))


async def test_a_folders_engine_answers_with_its_own_tokenizer(policy_folder: Path, tmp_path: Path) -> None:
    """An engine of the user's, which answers with the prompt's first token, a text's beginning, and its seed."""
    (tmp_path / "engine_of_rows.py").write_text(ENGINE)
    path = write(tmp_path / "prompts.jsonl", {"prompt": "w20"}, {"prompt": "w21"})
    wanted = Wanted(path, tmp_path / "out", model=str(policy_folder), samples=2, seed=30, max_tokens=2)
    config = RolloutConfig.parse({"engine": "engine_of_rows:start", "model": str(policy_folder)}, "args")
    offline = OfflineRollout(config, {"PYTHONPATH": str(tmp_path)})
    with RowFile(path) as file:
        source = Folder(wanted, file, offline)
        async with source.running():
            said = [await source.respond(index, file[index], sample) for index in range(2) for sample in range(2)]
    assert [answer.response for answer in said] == ["w30", "w31", "w32", "w33"]
    assert all(answer.ended for answer in said)


async def test_a_folders_engine_may_be_late_and_prompts_too_long(policy_folder: Path, tmp_path: Path) -> None:
    """Such a row has no response; the others have. The engine never answers the second row's seed."""
    (tmp_path / "engine_of_rows.py").write_text(ENGINE.replace("token == 7", "seed == 31"))
    prompts = (" ".join(["w20"] * 20), "w20", "w21")
    path = write(tmp_path / "prompts.jsonl", *({"prompt": prompt} for prompt in prompts))
    wanted = Wanted(path, tmp_path / "out", model=str(policy_folder), seed=30, max_tokens=2, timeout_s=1)
    config = RolloutConfig.parse({"engine": "engine_of_rows:start", "model": str(policy_folder)}, "args")
    with RowFile(path) as file:
        source = Folder(wanted, file, OfflineRollout(config, {"PYTHONPATH": str(tmp_path)}))
        async with source.running():
            long, late, fine = [await source.respond(index, file[index], 0) for index in range(3)]
    assert (long.response, long.may_pass) == (None, False)
    assert re.search(r"prompts\[0\]: \d+ tokens; must be fewer than 16", long.problem)
    assert (late.response, late.may_pass) == (None, True)
    assert "not done within 1 s" in late.problem
    assert fine.response == "w32"


async def test_a_folders_engine_is_started_where_an_answer_is_missing_alone(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine_of_rows.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = write(tmp_path / "prompts.jsonl", {"prompt": "w20"})
    fields = {"engine": "engine_of_rows:start"}
    wanted = Wanted(path, tmp_path / "out", model=str(policy_folder), seed=30, max_tokens=2, fields=fields)
    service = Service({"length": length})
    refused = {
        "--against: no such file": replace(wanted, against=tmp_path / "nothing"),
        "--model, --field.kv_cache_mb: unknown": replace(wanted, fields=fields | {"kv_cache_mb": 4}),
    }
    for said, wrong in refused.items():
        with pytest.raises(ConfigError, match=said):
            await run(wrong, service)
    assert not (tmp_path / "out").exists()
    for _ in range(2):
        assert (await run(wanted, service)).figures[0].scored == 1
    with pytest.raises(ConfigError, match="--seed: was 30"):
        await run(replace(wanted, seed=31), service)
    assert (tmp_path / "started").read_text() == f"{policy_folder}\n"


async def test_the_page_has_each_figure_with_its_scorer_and_no_script(tmp_path: Path) -> None:
    given = [("<script>alert(1)</script>", "a & b", "x"), ("q", "?", "<i>")]
    path = responses(tmp_path / "a.jsonl", *given)
    service = Service({"length": length, "judge": lambda prompt, response: Unscored(Outcome.REFUSED, "<b>no</b>")})
    results = await run(Wanted(path, tmp_path / "out", by=["source"]), service, "length", "judge")
    page = write_page(tmp_path / "out").read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    for text in ("function:length hhhhhhhhhhhh", "5.000", "1 of 2", "1 not applicable", "2 refused", "source=x"):
        assert text in page
    table = results.table()
    assert table.row_count == len(results.figures) == 6


def test_fields_are_json() -> None:
    assert fields_of(["top_p=0.9", 'stop=["a=b"]', 'name="x"']) == {"top_p": 0.9, "stop": ["a=b"], "name": "x"}
    for wrong in ("top_p", "=1", "name=x", "top_p=NaN", "top_p=1e999", "stop=" + "[" * 100_000):
        with pytest.raises(ConfigError, match="--field: should be NAME=JSON"):
            fields_of([wrong])
