"""Clients of OpenAI's protocol that others have written, as they are: `python clients_peer.py NAME SETTINGS`.

Runs in an environment of their own, and prints what they got as a line of JSON. The settings are JSON: `url` of
`/v1`, `key`, `model`, `tokenizer` (a folder) and `folder` for files.
"""

import asyncio
import json
import os
import sys
from typing import Any

SAID = [{"role": "user", "content": "w8 w9"}]


def by_litellm(url: str, key: str, model: str, **_: Any) -> Any:
    import litellm

    asks: dict[str, Any] = {"model": f"openai/{model}", "api_base": url, "api_key": key, "messages": SAID}
    asks |= {"max_tokens": 8, "seed": 5}
    whole = litellm.completion(**asks, logprobs=True, extra_body={"return_token_ids": True})
    parts = [event.choices[0].delta.content or "" for event in litellm.completion(**asks, stream=True)]
    [choice] = whole.choices
    return {
        **{"text": choice.message.content, "streamed": "".join(parts)},
        "logprobs": [token.logprob for token in choice.logprobs.content],
    }


def by_inspect(url: str, key: str, model: str, folder: str, **_: Any) -> Any:
    os.environ |= {"QUARTET_BASE_URL": url, "QUARTET_API_KEY": key}
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    task = Task(
        dataset=[Sample(input="w8 w9", target="w")],
        solver=generate(),
        scorer=includes(),
        config=GenerateConfig(max_tokens=8, seed=5),
    )
    [log] = eval(task, model=f"openai-api/quartet/{model}", log_dir=folder, display="plain")
    assert log.samples, log.error
    return {"status": log.status, "text": log.samples[0].output.completion}


def by_renderers(url: str, key: str, model: str, tokenizer: str, **_: Any) -> Any:
    """The client of verifiers and prime-rl that sends and takes tokens."""
    from openai import AsyncOpenAI
    from renderers import DefaultRendererConfig, create_renderer
    from renderers.client import generate
    from transformers import AutoTokenizer

    renderer = create_renderer(AutoTokenizer.from_pretrained(tokenizer), DefaultRendererConfig())

    async def ask() -> Any:
        async with AsyncOpenAI(base_url=url, api_key=key) as client:
            return await generate(
                **{"client": client, "renderer": renderer, "messages": SAID, "model": model, "cache_salt": "3"},
                sampling_params={"temperature": 1.0, "max_tokens": 8, "seed": 5},
                extra_headers={"X-Session-ID": "rollout-17"},
            )

    got = asyncio.run(ask())
    return {name: got[name] for name in ("prompt_ids", "completion_ids", "completion_logprobs")}


CLIENTS: dict[str, Any] = {"litellm": by_litellm, "inspect": by_inspect, "renderers": by_renderers}

if __name__ == "__main__":
    print(json.dumps(CLIENTS[sys.argv[1]](**json.loads(sys.argv[2]))))
