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


def by_verifiers(url: str, key: str, model: str, tokenizer: str, **_: Any) -> Any:
    """Two turns by verifiers' client for training, with which prime-rl trains: it sends and takes tokens. And one by
    its client for evaluation, which passes an agent's requests on."""
    os.environ["QUARTET_API_KEY"] = key
    from renderers import DefaultRendererConfig
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    address = {"base_url": url, "api_key_var": "QUARTET_API_KEY"}
    train = TrainClientConfig(**address, renderer_model_name=tokenizer, renderer=DefaultRendererConfig())
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "seed": 5}

    async def ask(client: Any, messages: Any, **settings: Any) -> Any:
        body = {"model": model, "messages": messages, **settings}
        given = SamplingConfig(**sampling, cache_salt="3")
        return await client.get_response(ChatDialect(), body, given, session_id="rollout-17")

    async def asks() -> tuple[list[Any], str]:
        client, other = TrainClient(train), EvalClient(EvalClientConfig(**address))
        try:
            first = await ask(client, SAID)
            history = [*SAID, {"role": "assistant", "content": first.message.content}, *SAID]
            passed_on = await ask(other, SAID, **sampling)
            return [first.tokens, (await ask(client, history)).tokens], passed_on.message.content
        finally:
            await client.close()
            await other.close()

    turns, text = asyncio.run(asks())
    names = ("prompt_ids", "completion_ids", "completion_logprobs")
    return {"turns": [{name: getattr(turn, name) for name in names} for turn in turns], "text": text}


CLIENTS: dict[str, Any] = {
    "litellm": by_litellm,
    "inspect": by_inspect,
    "verifiers": by_verifiers,
}

if __name__ == "__main__":
    print(json.dumps(CLIENTS[sys.argv[1]](**json.loads(sys.argv[2]))))
