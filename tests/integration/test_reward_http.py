"""The reward service over HTTP on the real services: its page, the scores of gRPC, metrics, and hostile requests."""

import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests import plain
from tests.cluster import Quartet
from tests.configuration import REPO
from tests.fuzz.http import fuzz, requests
from tests.fuzz.processes import replica_processes
from tests.http_requests import Answer, ask, bearer
from tests.pages import Page, shell
from tests.trajectories import of


async def asked(quartet: Quartet, path: str, body: Any = None) -> Answer:
    return await ask(quartet.http, f"/reward{path}", body, bearer(quartet.token))


async def test_scores_are_those_of_grpc(quartet: Quartet) -> None:
    prompts, responses = plain.random_pairs(20)
    expected = await quartet.services.reward.score(of(prompts, responses), timeout_s=60)
    ids = [{"prompt_ids": p.tolist(), "response_ids": r.tolist()} for p, r in zip(prompts, responses, strict=True)]
    got = await asked(quartet, "/v1/rewards", {"pairs": ids})
    assert got.status == 200, got.body
    scores = [result["scores"]["score"] for result in got.json["results"]]
    assert scores == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert got.json["scorer"] == {"name": expected.scorer, "model_hash": expected.model_hash}
    whole = [[*p.tolist(), *r.tolist()] for p, r in zip(prompts, responses, strict=True)]
    classified = (await asked(quartet, "/classify", {"input": whole})).json["data"]
    assert [each["probs"][0] for each in classified] == pytest.approx(scores, abs=1e-5)


def programs() -> dict[str, tuple[str, list[str]]]:
    """Language -> the page's program in it, and the command that runs one, of those that this machine has."""
    runs = {"python": [sys.executable], "javascript": ["node"], "go": ["go", "run"]}
    text = (REPO / "docs/reward-http.md").read_text()
    found = {language: text.partition(f"```{language}\n")[2].partition("```")[0] for language in runs}
    assert all(found.values())
    return {language: (found[language], run) for language, run in runs.items() if shutil.which(run[0])}


def test_the_page_works_as_it_stands(quartet: Quartet) -> None:
    page = Page.at("reward-http.md")
    assert len(page.commands) == 2
    for line in page.commands:
        shell(quartet.folder, line.replace("curl -sS", "curl -sS --fail").replace(":18000/", f":{quartet.http}/"))
    for language, (program, run) in programs().items():
        file = quartet.folder / f"ask.{ {'python': 'py', 'javascript': 'js', 'go': 'go'}[language] }"
        file.write_text(program.replace(":18000/", f":{quartet.http}/"))
        done = subprocess.run(
            [*run, str(file)], cwd=quartet.folder, env=dict(os.environ), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert re.search(r"\d\.\d|score", done.stdout), done.stdout


async def test_measures_are_of_both_doors(quartet: Quartet) -> None:
    await quartet.services.reward.score(of([[5]], [[6]]), timeout_s=60)
    await asked(quartet, "/v1/rewards", {"pairs": [{"prompt": "w5", "response": "w6"}]})
    text = (await asked(quartet, "/metrics")).body.decode()
    name = f"model:{quartet.reward.name}"
    for door in ("grpc", "rewards"):
        line = rf'quartet_reward_calls_total\{{door="{door}",replica="[^"]+",scorer="{name}",status="ok"\}} [1-9]'
        assert re.search(line, text), text
    assert (await asked(quartet, "/health")).json == {"status": "serving"}


COUNTS = [300, pytest.param(100_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)])]  # more of the same


@pytest.mark.parametrize("count", COUNTS)
async def test_hostile_requests_get_a_reason_and_no_process_is_replaced(quartet: Quartet, count: int) -> None:
    before, page = replica_processes(quartet), (await asked(quartet, "/openapi.json")).json
    token = f"Authorization: Bearer {quartet.token}\r\n"
    verdict = await fuzz(quartet.http, requests(page, seed=1, count=count, more=token))
    print(dict(verdict.statuses), f"slowest {verdict.slowest_s:.1f} s")
    assert verdict.faults == []
    assert verdict.statuses[200] > count / 20, "hardly any request got through: it only knocks at the door"
    assert replica_processes(quartet) == before
