"""The tokens of prompts that a vLLM engine computes, by its own count."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def prefilled(engine: Any) -> Iterator[list[int]]:
    """Gives a list to which each request of a VLLMEngine that ends meanwhile adds the tokens of its prompt that were
    not in the KV cache."""
    counted: list[int] = []
    llm = engine.llm
    plain = llm.generate

    async def counting(prompt: Any, params: Any, name: str, **given: Any) -> AsyncIterator[Any]:
        output = None
        async for output in plain(prompt, params, name, **given):
            yield output
        if output is not None:
            counted.append(len(output.prompt_token_ids) - output.num_cached_tokens)

    llm.generate = counting
    try:
        yield counted
    finally:
        llm.generate = plain
