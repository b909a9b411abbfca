"""Clients of OpenAI's protocol that others have written, unmodified, on the real services."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from services.rollout.sample import Sampling
from tests.cluster import Quartet
from tests.configuration import REPO
from tests.http_requests import ask, bearer
from tests.installed import installed

pytestmark = pytest.mark.exhaustive
PEER = Path(__file__).parents[1] / "clients_peer.py"
LIBRARIES = ("lm-eval[api,hf]==0.4.13", "litellm>=1.110", "inspect-ai==0.3.285", "torch==2.13.0")
VERIFIERS = ("verifiers==0.4.0",)
"""Takes an older library of OpenAI's than inspect-ai does."""
AS_MEAN = {"aggregation": "mean", "higher_is_better": True}
"""Fields that lm-evaluation-harness needs for a metric which it does not have itself."""
SAID = [{"role": "user", "content": "w8 w9"}]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the clients in it."""
    return installed(tmp_path_factory.mktemp("clients") / "environment", LIBRARIES)


@pytest.fixture
def settings(quartet: Quartet, tmp_path: Path) -> dict[str, str]:
    return {
        **{"url": f"http://127.0.0.1:{quartet.http}/rollout/v1", "key": quartet.token, "model": "policy"},
        **{"tokenizer": str(quartet.folder / "policy-with-template"), "folder": str(tmp_path)},
    }


@pytest.fixture
async def named(quartet: Quartet, base: Any, settings: dict[str, str]) -> dict[str, str]:
    """The settings with the name under which the model is served."""
    models = (await ask(quartet.http, "/rollout/v1/models", None, bearer(quartet.token))).json
    return settings | {"model": models["data"][0]["id"]}


def run(command: list[str], folder: Path, **more: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        command, cwd=folder, env=kept | offline | more, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def by(name: str, python: Path, settings: Mapping[str, Any]) -> Any:
    printed = run([str(python), str(PEER), name, json.dumps(settings)], Path(settings["folder"]))
    return json.loads(printed.strip().splitlines()[-1])


async def directly(quartet: Quartet) -> Any:
    body = {"messages": SAID, "max_tokens": 8, "seed": 5, "logprobs": True}
    [choice] = (await ask(quartet.http, "/rollout/v1/chat/completions", body, bearer(quartet.token))).json["choices"]
    return choice


async def test_litellm(quartet: Quartet, python: Path, named: dict[str, str]) -> None:
    got, choice = by("litellm", python, named), await directly(quartet)
    assert got["text"] == got["streamed"] == choice["message"]["content"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert got["logprobs"] == pytest.approx(logprobs, abs=1e-5)


async def test_inspect(quartet: Quartet, python: Path, named: dict[str, str]) -> None:
    got, choice = by("inspect", python, named), await directly(quartet)
    assert (got["status"], got["text"]) == ("success", choice["message"]["content"])


async def test_verifiers_clients(quartet: Quartet, tmp_path: Path, named: dict[str, str]) -> None:
    got = by("verifiers", installed(tmp_path / "environment", VERIFIERS), named)
    assert got["text"] == (await directly(quartet))["message"]["content"]
    first, second = got["turns"]
    assert len(second["prompt_ids"]) > len(first["prompt_ids"])
    for turn in (first, second):
        prompt = np.asarray(turn["prompt_ids"], np.int32)
        stream = quartet.services.rollout.generate([prompt], Sampling(max_new_tokens=8), seeds=[5], timeout_s=60)
        [sample] = [sample async for samples in stream for sample in samples]
        assert turn["completion_ids"] == sample.response_ids.tolist()
        assert turn["completion_logprobs"] == pytest.approx(sample.logprobs.tolist(), abs=1e-5)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with a task of lm-evaluation-harness: which of three continuations is likelier."""
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(30):
        words = [" ".join(f"w{number}" for number in draw.integers(4, 64, 6)) for _ in range(4)]
        rows.append({"query": words[0], "choices": [f" {each}" for each in words[1:]], "gold": int(draw.integers(3))})
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {
        **{"task": "words", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"},
        "dataset_kwargs": {"data_files": {"test": str(folder / "words.jsonl")}},
        **{"doc_to_text": "{{query}}", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"},
        **{"target_delimiter": "", "metric_list": [{"metric": "acc"}]},
    }
    (folder / "words.yaml").write_text(yaml.safe_dump(described))
    said = {
        **{"task": "said", "dataset_path": "json", "test_split": "test", "output_type": "generate_until"},
        "dataset_kwargs": {"data_files": {"test": str(folder / "words.jsonl")}},
        **{"doc_to_text": "{{query}}", "doc_to_target": "{{query}}"},
        "generation_kwargs": {"max_gen_toks": 8, "do_sample": False, "until": ["w5 "]},
        "metric_list": [{"metric": "exact_match"}],
    }
    (folder / "said.yaml").write_text(yaml.safe_dump(said))
    return folder


def harness(
    python: Path, task: Path, name: str, kind: str, arguments: str, key: str, *more: str, **variables: str
) -> list[Any]:
    """Samples of a task by lm-evaluation-harness, in their order."""
    out = task.parent / kind
    options = ["--tasks", name, "--include_path", str(task), "--log_samples", "--output_path", str(out), *more]
    command = [str(python), "-m", "lm_eval", "--model", kind, "--model_args", arguments, *options]
    run(command, task.parent, OPENAI_API_KEY=key, HF_HOME=str(task.parent / "hub"), **variables)
    [file] = out.rglob(f"samples_{name}_*.jsonl")
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda each: each["doc_id"])


async def test_lm_eval_gives_the_figures_of_the_saved_folder(python: Path, task: Path, named: dict[str, str]) -> None:
    folder, url = named["tokenizer"], named["url"]
    saved = harness(python, task, "words", "hf", f"pretrained={folder},dtype=float32", "", "--device", "cpu")
    asked = f"model={named['model']},base_url={url}/completions,tokenizer={folder},max_length=128,num_concurrent=4"
    # The harness's own default where it loads a model whose tokenizer begins texts with a token.
    asked += ",add_bos_token=True"
    served = harness(python, task, "words", "local-completions", asked, named["key"])
    assert len(saved) == len(served) == 30
    for ours, theirs in zip(served, saved, strict=True):
        likely, expected = ([float(each[0]) for each in side["filtered_resps"]] for side in (ours, theirs))
        assert likely == pytest.approx(expected, abs=1e-3)
        assert ours["acc"] == theirs["acc"]


async def test_lm_eval_has_responses_scored_by_the_hub(quartet: Quartet, python: Path, task: Path) -> None:
    (task / "lm_eval_hub.py").write_text((REPO / "examples/lm_eval_hub.py").read_text())
    scored = yaml.safe_load((task / "said.yaml").read_text()) | {
        "task": "scored",
        "metric_list": [{"metric": "hub", **AS_MEAN}],
    }
    called = "process_results: !function lm_eval_hub.process_results\n"
    (task / "scored.yaml").write_text(yaml.safe_dump(scored) + called)
    lines = (task / "words.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    (task / "words.jsonl").write_text(
        "".join(json.dumps(row | {"question": row["query"], "answer": ""}) + "\n" for row in rows)
    )
    hub = {"QUARTET_HUB": f"http://127.0.0.1:{quartet.http}/reward", "QUARTET_TOKEN": quartet.token}
    found = harness(python, task, "scored", "dummy", "", "", "--limit", "5", **hub)
    said = [each["resps"][0][0] for each in found]
    direct = await quartet.services.reward.score_texts([row["query"] for row in rows[:5]], said, timeout_s=60)
    assert [each["hub"] for each in found] == pytest.approx(direct.values.tolist(), abs=1e-5)


async def test_lm_eval_chats(quartet: Quartet, python: Path, task: Path, named: dict[str, str]) -> None:
    asked = f"model={named['model']},base_url={named['url']}/chat/completions,num_concurrent=4"
    served = harness(
        python, task, "said", "local-chat-completions", asked, named["key"], "--apply_chat_template", "--limit", "6"
    )
    assert len(served) == 6
    for each in served:
        body = {
            "messages": [{"role": "user", "content": each["doc"]["query"]}],
            **{"max_tokens": 8, "temperature": 0, "stop": ["w5 "]},
        }
        got = await ask(quartet.http, "/rollout/v1/chat/completions", body, bearer(quartet.token))
        assert each["resps"][0][0] == got.json["choices"][0]["message"]["content"]
