"""The tokens after a response, by templates in the forms of Qwen, Llama 3 and Gemma: those before stay as they are.

Tokens are drawn at random, so that hardly any response is what its own text would be tokenised to.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError

from quartet.trajectory import Segment
from services.rollout.histories import answered, digests
from services.rollout.sessions import Begun, Sessions
from services.rollout.vllm.following import following
from tests.chat import make_bytes

QWEN = (
    "{%- for m in messages %}{%- set text = m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else "
    "m.content %}{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA = (
    "{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + "
    "'<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
GEMMA = (
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + "
    "'<end_of_turn>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
BARE = "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
TEMPLATES = {
    "qwen": (QWEN, "<|im_end|>", "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"),
    "llama": (
        *(LLAMA, "<|eot_id|>"),
        "<|start_header_id|>user<|end_header_id|>\n\nnext<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": (GEMMA, "<end_of_turn>", "\n<start_of_turn>user\nnext<end_of_turn>\n<start_of_turn>model\n"),
    "bare": (BARE, "<|endoftext|>", "\nuser: next\n"),
}
"""Template -> its text, the token that ends a response, and what follows that before the next."""


class Renderer:
    """vLLM's, as far as it is asked."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def render_messages_async(self, messages: list[Any], params: Any) -> tuple[None, dict[str, str]]:
        try:
            return None, {"prompt": self._tokenizer.apply_chat_template(messages, **params.chat_template_kwargs)}
        except Exception as error:
            raise VLLMValidationError(str(error)) from None


class Model:
    """A tokenizer with a template."""

    def __init__(self, name: str) -> None:
        template, self.end, self.next = TEMPLATES[name]
        self.tokenizer = make_bytes()
        self.tokenizer.chat_template = template
        self.end_id = int(self.tokenizer.convert_tokens_to_ids(self.end))
        self.engine: Any = SimpleNamespace(tokenizer=self.tokenizer, end_ids=(self.end_id,))

    def first(self, messages: list[Any]) -> Any:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    async def follow(self, messages: list[Any], begun: Begun, **more: Any) -> Any:
        request = ChatCompletionRequest.model_validate({"messages": messages, **more})
        return await following(Renderer(self.tokenizer), self.engine, request, messages, begun)


USER, NEXT = {"role": "user", "content": "abab"}, {"role": "user", "content": "next"}


async def two_turns(model: Model, count: int) -> int:
    """Has conversations of three random responses, each in a session; returns how many responses were not what their
    text is tokenised to."""
    random, others = np.random.default_rng(0), 0
    sessions, following_ids = Sessions(), model.tokenizer(model.next, add_special_tokens=False)["input_ids"]
    for number in range(count):
        name, messages, prompt = f"s{number}", [USER], model.first([USER])
        sessions.start("me", name, "t")
        expected = prompt.tolist()
        for turn in range(3):
            drawn = random.integers(0, len(model.tokenizer), int(random.integers(1, 12)))
            sampled = np.asarray([*drawn[drawn != model.end_id], model.end_id], np.int32)
            text = model.tokenizer.decode(sampled, skip_special_tokens=True)
            others += model.tokenizer(text, add_special_tokens=False)["input_ids"] != sampled[:-1].tolist()
            answer = {"role": "assistant", "content": text}
            segment = Segment(sampled, np.zeros(len(sampled), np.float32), ((0, 0, len(sampled)),))
            sessions.record(
                "me", name, str(turn), prompt, segment, answered(digests({"messages": messages})[-1], answer)
            )
            expected += [*sampled.tolist(), *following_ids]
            messages = [*messages, answer, NEXT]
            begun = sessions.begun("me", name, digests({"messages": messages}), "t").begun
            prompt = await model.follow(messages, begun)
            assert prompt.tolist() == expected
        told = sessions.trajectory("me", name)
        assert (told["forks"], len(told["sequences"][0]["segments"])) == (0, 6)
    return others


@pytest.mark.parametrize("name", TEMPLATES)
async def test_responses_stay_the_tokens_that_they_were(name: str) -> None:
    assert await two_turns(Model(name), 40) > 60


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen", "llama", "gemma"])
async def test_ten_thousand_responses_stay_the_tokens_that_they_were(name: str) -> None:
    assert await two_turns(Model(name), 1200) > 2000


async def test_a_response_that_was_cut_off_is_ended_first() -> None:
    model = Model("qwen")
    begun = Begun(np.asarray([1, 2, 3], np.int32), 2)
    got = await model.follow([USER, {"role": "assistant", "content": "a"}, NEXT], begun)
    assert got[:3].tolist() == [1, 2, 3]
    assert model.tokenizer.decode(got[3:]) == model.end + model.next


async def test_a_response_that_ended_as_the_request_asked_is_not_ended_twice() -> None:
    """The folder of a base model names <|endoftext|> alone, and its chats are asked to stop at <|im_end|>."""
    model = Model("qwen")
    ended = model.end_id
    model.engine.end_ids = (model.tokenizer.eos_token_id,)
    begun = Begun(np.asarray([1, 2, ended], np.int32), 2)
    history = [USER, {"role": "assistant", "content": "a"}, NEXT]
    got = await model.follow(history, begun, stop_token_ids=[ended])
    assert model.tokenizer.decode(got[3:]) == model.next


async def test_reasoning_that_the_template_would_drop_stays() -> None:
    model = Model("qwen")
    ids = model.tokenizer(f"<think>a</think>b{model.end}", add_special_tokens=False)["input_ids"]
    begun = Begun(np.asarray(ids, np.int32), 2)
    got = await model.follow([USER, {"role": "assistant", "content": "<think>a</think>b"}, NEXT], begun)
    assert model.tokenizer.decode(got) == f"<think>a</think>b{model.end}{model.next}"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for m in messages %}{% endfor %}", "{{ 1 }}"]
)
async def test_a_template_that_cannot_say_it_has_all_rendered(template: str) -> None:
    model = Model("qwen")
    model.tokenizer.chat_template = template
    begun = Begun(np.asarray([1], np.int32), 2)
    assert await model.follow([USER, {"role": "assistant", "content": "a"}, NEXT], begun) is None
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    model.tokenizer.chat_template = twice
    assert await model.follow([USER, {"role": "assistant", "content": "a"}, NEXT], begun) is None
