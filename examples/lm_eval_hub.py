"""A metric for lm-evaluation-harness: the score of each response by a scorer of a hub, over HTTP.

It needs nothing but Python. Put this file beside the task's YAML, and name the function there:

    task: gsm8k_hub
    dataset_path: openai/gsm8k
    dataset_name: main
    output_type: generate_until
    test_split: test
    doc_to_text: "{{question}}"
    doc_to_target: "{{answer}}"
    process_results: !function lm_eval_hub.process_results
    metric_list:
      - {metric: hub, aggregation: mean, higher_is_better: true}

    export QUARTET_HUB=http://127.0.0.1:18000/reward QUARTET_SCORER=math QUARTET_TOKEN=$(cat .quartet/access/token)
    lm_eval --tasks gsm8k_hub --include_path . ...

The hub's file needs `security: {http: true}`. A response without a score ends the evaluation with the reason, as no
number stands for it.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

PROMPT, LABEL = "question", "answer"
"""Columns of the data set."""
TIMEOUT_S = 120.0
"""Longest time for a score, in seconds, with all that is asked again."""


class UnscoredError(RuntimeError):
    """The hub has not scored a response."""


class _NoRedirects(HTTPRedirectHandler):
    """The key goes to the address that the user gave, and to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follows none: the answer is an error of status 3xx."""


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The metrics of one response: `hub`, or `hub_` and the name for each of several named scores.

    Raises:
        UnscoredError: it has no score.
        RuntimeError: the hub refuses the request, or does not answer it.
    """
    columns = json.loads(json.dumps(dict(doc), default=str))  # a data set may hold dates
    pair = {"prompt": str(doc[PROMPT]), "response": results[0], "label": str(doc[LABEL]), "columns": columns}
    hub, token = os.environ.get("QUARTET_HUB", "http://127.0.0.1:18000/reward"), os.environ.get("QUARTET_TOKEN")
    body = {"scorer": os.environ.get("QUARTET_SCORER", ""), "pairs": [pair]}
    answer = asked(hub.rstrip("/"), token, body, TIMEOUT_S)
    [result], scorer = answer["results"], answer["scorer"]["name"]
    if result["outcome"] != "scored":
        raise UnscoredError(f"{scorer}: {result['outcome']}: {result['reason']} (prompt {pair['prompt'][:80]!r})")
    scores: dict[str, float] = result["scores"]
    return {"hub" if len(scores) == 1 else f"hub_{name}": score for name, score in scores.items()}


def asked(hub: str, token: str | None, body: Mapping[str, Any], timeout_s: float) -> Any:
    """The hub's answer. A hub that is busy is asked again. RuntimeError if it refuses the request, or gives no
    answer in time or none in JSON."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    request = Request(f"{hub}/v1/rewards", json.dumps(body).encode(), headers)
    # A proxy that the environment names is for other machines.
    here = urlsplit(hub).hostname in ("127.0.0.1", "::1", "localhost")
    opener, ends = build_opener(_NoRedirects(), *([ProxyHandler({})] if here else [])), time.monotonic() + timeout_s
    while True:
        try:
            with opener.open(request, timeout=max(0.1, ends - time.monotonic())) as reply:
                return json.load(reply)
        except HTTPError as error:
            pause = float(error.headers.get("retry-after") or 1)
            if error.code not in (429, 503) or time.monotonic() + pause > ends:
                said = error.read(1000).decode(errors="replace")
                raise RuntimeError(f"{hub}: status {error.code}: {said}") from None
            time.sleep(pause)
        except (OSError, HTTPException, ValueError) as error:  # which name no address
            raise RuntimeError(f"{hub}: no answer: {error}") from error
