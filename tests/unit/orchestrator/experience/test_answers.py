"""Answers of environments: as text, messages or ids, in time, within bounds; and what is none."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data.rendering import follow
from orchestrator.environments.contract import Answer, Call, Environment, Results, Turn
from orchestrator.environments.tools import Tools
from orchestrator.experience import answers as module
from orchestrator.experience import user_function
from orchestrator.experience.answers import Answers
from orchestrator.experience.calls import UNREADABLE
from orchestrator.experience.conversation import Conversation, trajectories
from quartet.config.base import ConfigError
from services.rollout.sample import FinishReason, Sample
from tests.chat import LLAMA, QWEN, make_bytes
from tests.models import EOS, make_tokenizer
from tests.unit.fakes import make_config, make_requests

TEMPLATE = (
    "{% for m in messages %}w4 {{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}w5{% endif %}"
)


OTHER_END = 50
"""Another token by which the model ends a response."""


class Told(Environment):
    """Answers by a function of the turn."""

    name = "told"
    identity = "told"

    def __init__(self, answer: Callable[[Turn], Any]) -> None:
        self.turns: list[Turn] = []
        self._answer = answer

    def answer(self, turn: Turn) -> Answer:
        self.turns.append(turn)
        given: Answer = self._answer(turn)
        return given


class Awaited(Told):
    async def answer(self, turn: Turn) -> Answer:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().answer(turn)


def asking(
    folder: Path, environment: Environment, stops: tuple[int, ...] = (), tokenizer: Any = None, **bounds: Any
) -> Answers:
    given = {"kind": "a:B", "max_tokens": 40} | bounds
    config = make_config(folder, environment=given, sampling={"max_new_tokens": 4, "stop_token_ids": stops})
    if tokenizer is None:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = TEMPLATE
    return Answers(environment, config, tokenizer, (EOS, OTHER_END, *stops))


def after(*ids: int, reason: FinishReason = FinishReason.STOP, number: int = 0) -> Conversation:
    """A prompt, and a response of these tokens."""
    sample = Sample(0, np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), reason, ((1, 0, len(ids)),))
    return Conversation.of(make_requests(number + 1)[number]).responded(sample)


def always(answer: Any) -> Callable[[Turn], Any]:
    return lambda turn: answer


def segments(conversation: Conversation) -> list[list[int]]:
    return [segment.ids.tolist() for segment in conversation.segments]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_function, "PAUSE_S", 0.0)


@pytest.mark.parametrize("kind", [Told, Awaited])
async def test_text_becomes_the_next_given_segment(kind: type[Told], policy_folder: Path) -> None:
    environment = kind(lambda turn: "w7 w8")
    answered = await asking(policy_folder, environment).to(after(12, EOS))
    # Without the token that the tokenizer puts before a text of its own.
    assert segments(answered) == [[10], [12, EOS], [7, 8]]
    assert not answered.segments[-1].sampled
    assert answered.texts == ("w12", "w7 w8")
    [turn] = environment.turns
    assert (turn.number, turn.sample, turn.row, turn.prompt, turn.label) == (1, 0, 0, "w10", "0")
    assert (turn.response, turn.texts, turn.ended, turn.ids.tolist()) == ("w12", ("w12",), True, [10, 12, EOS])


async def test_ids_are_taken_as_they_are(policy_folder: Path) -> None:
    for ids in ([7, 8], np.asarray([7, 8]), (7, 8)):
        answered = await asking(policy_folder, Told(always(ids))).to(after(12))
        assert segments(answered) == [[10], [12], [7, 8]]
        assert answered.segments[-1].ids.dtype == np.int32


async def test_messages_are_rendered_behind_the_response_and_the_response_never_again(policy_folder: Path) -> None:
    environment = Told(lambda turn: [{"role": "w20", "content": "w30 w31"}])
    # The response brought the end of its turn: the template's is left out.
    ended = await asking(policy_folder, environment).to(after(12, EOS))
    assert segments(ended)[2] == [4, 20, 30, 31, EOS, 5]
    cut_off = await asking(policy_folder, environment).to(after(12, 13, reason=FinishReason.LENGTH))
    assert segments(cut_off)[2] == [EOS, 4, 20, 30, 31, EOS, 5]
    assert [turn.ended for turn in environment.turns] == [True, False]


async def test_messages_that_come_together_are_rendered_together(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []

    def counted(asked: Any, *rest: Any) -> list[str]:
        rendered.append(len(asked))
        return follow(asked, *rest)

    monkeypatch.setattr(module, "follow", counted)
    answers = asking(policy_folder, Awaited(lambda turn: [{"role": "w20", "content": f"w{30 + turn.sample}"}]))
    given = await asyncio.gather(*(answers.to(after(12, EOS, number=number)) for number in range(6)))
    assert [segments(each)[2] for each in given] == [[4, 20, 30 + number, EOS, 5] for number in range(6)]
    assert sum(rendered) == 6
    assert len(rendered) <= 2


class OffLoop:
    """A tokenizer that needs the event loop for each text: TimeoutError where that waits for it."""

    def __init__(self) -> None:
        self._tokenizer, self._loop = make_tokenizer(), asyncio.get_running_loop()
        self._tokenizer.chat_template = TEMPLATE

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(10)
        return self._tokenizer(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("kind", [Told, Awaited])
async def test_the_run_goes_on_while_answers_are_tokenised(kind: type[Told], policy_folder: Path) -> None:
    given = [[{"role": "w20", "content": "w30"}], "w31", [32], [{"role": "w21", "content": "w33"}]]
    answers = asking(policy_folder, kind(lambda turn: given[turn.sample]), tokenizer=OffLoop())
    told = await asyncio.gather(*(answers.to(after(12, EOS, number=number)) for number in range(4)))
    assert [segments(each)[2] for each in told] == [[4, 20, 30, EOS, 5], [31], [32], [4, 21, 33, EOS, 5]]


async def test_a_conversation_ends_by_none_and_after_its_last_turn(policy_folder: Path) -> None:
    silent = Told(lambda turn: None)
    conversation = after(12, EOS)
    assert segments(await asking(policy_folder, silent).to(conversation)) == [[10], [12, EOS]]
    environment = Told(lambda turn: "w7")
    answers = asking(policy_folder, environment, max_turns=3)
    for number in (1, 2, 3):
        conversation = await answers.to(conversation)
        assert len(environment.turns) == min(number, 2)
        if number < 3:
            conversation = conversation.responded(sample_of(13))
    assert segments(conversation) == [[10], [12, EOS], [7], [13], [7], [13]]
    assert environment.turns[1].texts == ("w12", "w7", "w13")
    assert not conversation.truncated


def sample_of(*ids: int) -> Sample:
    return Sample(
        0, np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), FinishReason.STOP, ((1, 0, len(ids)),)
    )


async def test_no_response_is_begun_for_which_there_may_not_be_room(policy_folder: Path) -> None:
    """A response has 2 of 10 tokens and the next one may have 4: an answer of 4 fits, and one of 5 does not."""
    for length, fits in ((4, True), (5, False)):
        answers = asking(policy_folder, Told(always([7] * length)), max_tokens=10)
        answered = await answers.to(after(12, EOS))
        assert answered.segments[-1].sampled is not fits
        assert answered.truncated is not fits


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("", "an answer without tokens"),
        ([], "an answer without tokens"),
        ([64], r"ids outside the tokenizer's vocabulary \(0 to 63\)"),
        ([-1], "ids outside the tokenizer's vocabulary"),
        ([1 << 40], "ids outside the tokenizer's vocabulary"),
        ([0.5], r"gave '\[0.5\]'; should give text, chat messages, token ids, or None"),
        ([[1], [2]], "should give text, chat messages, token ids, or None"),
        (7, "should give text, chat messages, token ids, or None"),
        (b"w7", "should give text"),
        ("\ud800", "cannot be tokenised"),
    ],
)
async def test_what_is_no_answer_is_told_with_its_place(answer: Any, said: str, policy_folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"^environment told: sample 0, prompt row 0, turn 1: .*{said}"):
        await asking(policy_folder, Told(always(answer))).to(after(12))


async def test_a_failure_is_tried_again_and_then_told(policy_folder: Path) -> None:
    tried: list[int] = []

    def fails(turn: Turn) -> Answer:
        tried.append(turn.number)
        if len(tried) % 4:
            raise OSError("the tool is gone")
        return "w7"

    answers = asking(policy_folder, Told(fails))
    line = fails.__code__.co_firstlineno + 3
    said = r"^environment told: sample 0, prompt row 0, turn 1: failed with OSError\('the tool is gone'\) at line "
    said += rf"{line} of {__name__}, the last of 3 attempts \(orchestrator.environment.answer_s, attempts\)"
    with pytest.raises(ConfigError, match=said):
        await answers.to(after(12))
    assert len(tried) == 3
    assert segments(await answers.to(after(12))) == [[10], [12], [7]]  # the fourth works


async def test_an_answer_has_as_long_as_the_section_says(policy_folder: Path) -> None:
    never = asyncio.Event()
    answers = asking(policy_folder, Told(lambda turn: never.wait()), answer_s=0.1, attempts=1)
    with pytest.raises(ConfigError, match=r"turn 1: took longer than 0\.1 s, the last of 1 attempts"):
        await answers.to(after(12))


async def test_a_plain_function_answers_so_many_at_a_time_and_a_coroutine_function_all(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 2)
    now, most = list[int](), list[int]()
    both, all_of_them = threading.Barrier(2), asyncio.Barrier(4)

    def plain(turn: Turn) -> None:
        now.append(turn.sample)
        both.wait(20)
        time.sleep(0.1)  # a third would begin meanwhile
        most.append(len(now))
        both.wait(20)
        now.remove(turn.sample)

    async def coroutine(turn: Turn) -> None:
        await asyncio.wait_for(all_of_them.wait(), 20)

    for function in (plain, coroutine):
        environment = Told(always(None))
        environment.answer = function  # type: ignore[method-assign, assignment]
        answers = asking(policy_folder, environment, attempts=1)
        await asyncio.gather(*(answers.to(after(12, EOS, number=number)) for number in range(4)))
    assert most == [2, 2, 2, 2]


async def test_a_template_that_changes_a_response_is_refused(policy_folder: Path) -> None:
    answers = asking(policy_folder, Told(lambda turn: [{"role": "user", "content": "w7"}]))
    answers._tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(ConfigError, match="does not write a response once and as it is"):
        await answers.to(after(12))
    answers._tokenizer.chat_template = "{{ raise_exception('no second turn') }}"
    with pytest.raises(ConfigError, match="turn 1: the chat template refuses the messages: no second turn"):
        await answers.to(after(12))


@pytest.mark.parametrize(
    ("stops", "last", "brought"),
    [
        ((40,), EOS, True),
        ((40,), 40, False),  # such as the end of a tool's call
        ((EOS,), EOS, True),
        ((), OTHER_END, True),
        ((OTHER_END,), OTHER_END, False),
        ((), 12, False),
    ],
)
async def test_the_end_of_a_turn_is_written_once(
    stops: tuple[int, ...], last: int, brought: bool, policy_folder: Path
) -> None:
    answers = asking(policy_folder, Told(always([{"role": "w20", "content": "w30"}])), stops)
    expected = [4, 20, 30, EOS, 5]
    assert segments(await answers.to(after(12, last)))[2] == (expected if brought else [EOS, *expected])


class Spelling(Tools):
    """Tools of conversations in bytes."""

    def __init__(self) -> None:
        self.tried = 0

    def spell(self, word: str) -> str:
        """Spells a word.

        Args:
            word: the word.
        """
        return " ".join(word)

    async def fail(self, times: int) -> str:
        """Fails.

        Args:
            times: how often.
        """
        self.tried += 1
        if self.tried <= times:
            raise OSError("no paper")
        return "at last"


NEXT = {
    "qwen": (
        *(QWEN, "<|im_end|>", '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'),
        *("\n<|im_start|>user{}<|im_end|>\n<|im_start|>assistant\n", "\n<tool_response>\n{}\n</tool_response>"),
    ),
    "llama": (
        *(LLAMA, "<|eot_id|>", '{{"name": "{}", "parameters": {}}}'),
        *("{}<|start_header_id|>assistant<|end_header_id|>\n\n",),
        '<|start_header_id|>ipython<|end_header_id|>\n\n"{}"<|eot_id|>',
    ),
}
"""Template -> its text, the end of a response, a call, and what follows: around the answers, and for each."""


class Spoken:
    """Conversations in bytes, with tools, by one of the templates."""

    def __init__(self, name: str, folder: Path, environment: Environment | None = None, **bounds: Any) -> None:
        template, self.end, self._call, self._around, self._each = NEXT[name]
        self.tokenizer = make_bytes()
        self.tokenizer.chat_template = template
        self.end_id = int(self.tokenizer.convert_tokens_to_ids(self.end))
        section = {"data": {"path": "prompts", "chat_template": True}, "sampling": {"max_new_tokens": 200}}
        section |= {"environment": {"kind": "a:B", "max_turns": 3, "max_tokens": 4000} | bounds}
        config = make_config(folder, **section)
        self.answers = Answers(environment or Spelling(), config, self.tokenizer, (self.end_id,))

    def call(self, name: str, arguments: str) -> str:
        return self._call.format(name, arguments)

    def ids(self, text: str) -> list[int]:
        encoded: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return encoded

    def following(self, *answers: str) -> list[int]:
        return self.ids(self._around.format("".join(self._each.format(each) for each in answers)))

    def after(self, *ids: int, reason: FinishReason = FinishReason.STOP) -> Conversation:
        return after(*ids, reason=reason)


@pytest.fixture(params=NEXT)
def spoken(request: pytest.FixtureRequest, policy_folder: Path) -> Spoken:
    return Spoken(request.param, policy_folder)


async def test_calls_are_answered_behind_the_exact_tokens_of_the_response(spoken: Spoken) -> None:
    # As a policy may sample it: letters where the tokenizer would take its merges.
    text = spoken.call("spell", '{"word": "abab"}')
    alone = [token for letter in text for token in spoken.ids(letter)]
    assert alone != spoken.ids(text)
    response = [*alone, spoken.end_id]
    once = await spoken.answers.to(spoken.after(*response))
    assert segments(once)[1:] == [response, spoken.following("a b a b")]
    assert [segment.sampled for segment in once.segments] == [False, True, False]
    assert (once.calls, once.wrong_calls, once.truncated) == (1, 0, False)
    # The second response makes none, and ends the conversation.
    said = once.responded(sample_of(*spoken.ids("abab"), spoken.end_id))
    over = await spoken.answers.to(said)
    assert segments(over) == segments(said)
    assert trajectories([over])["calls"].tolist() == [1]
    assert trajectories([over])["turn"].tolist() == [2]


async def test_what_is_wrong_is_told_in_order_and_counted(policy_folder: Path) -> None:
    spoken = Spoken("qwen", policy_folder)
    text = "".join(
        spoken.call(name, arguments)
        for name, arguments in (("spell", '{"word": 7}'), ("spell", '{"word": "ab"}'), ("__init__", "{}"))
    )
    once = await spoken.answers.to(spoken.after(*spoken.ids(text), spoken.end_id))
    told = (
        "error: word: Input should be a valid string",
        "a b",
        ("error: there is no tool '__init__'; the tools are spell, fail"),
    )
    assert segments(once)[2] == spoken.following(*told)
    assert (once.calls, once.wrong_calls) == (3, 2)
    broken = once.responded(sample_of(*spoken.ids("<tool_call>{"), spoken.end_id))
    twice = await spoken.answers.to(broken)
    assert segments(twice)[4] == spoken.following(f"error: {UNREADABLE.problem}")
    assert (twice.calls, twice.wrong_calls) == (4, 3)


async def test_a_response_that_was_cut_off_is_not_read(spoken: Spoken) -> None:
    text = spoken.call("spell", '{"word": "ab"}')
    cut_off = spoken.after(*spoken.ids(text), reason=FinishReason.LENGTH)
    assert segments(await spoken.answers.to(cut_off)) == segments(cut_off)


async def test_a_tool_that_fails_is_asked_again_and_then_told(spoken: Spoken) -> None:
    text = spoken.call("fail", '{"times": 2}')
    once = await spoken.answers.to(spoken.after(*spoken.ids(text), spoken.end_id))
    assert segments(once)[2] == spoken.following("at last")
    text = spoken.call("fail", '{"times": 9}')
    line = Spelling.fail.__code__.co_firstlineno + 8
    with pytest.raises(
        ConfigError, match=rf"failed with OSError\('no paper'\) at line {line} of {__name__}, the last"
    ):
        await spoken.answers.to(spoken.after(*spoken.ids(text), spoken.end_id))


async def test_an_answer_that_leaves_no_room_ends_the_conversation_and_its_calls_count(policy_folder: Path) -> None:
    spoken = Spoken("qwen", policy_folder, max_tokens=401)
    text = spoken.call("spell", '{"word": "%s"}' % ("x" * 60))
    response = [*spoken.ids(text), spoken.end_id]
    over = await spoken.answers.to(spoken.after(*response))
    assert segments(over)[1:] == [response]
    assert (over.truncated, over.calls) == (True, 1)


async def test_an_environment_with_schemas_of_its_own_answers_calls_itself(policy_folder: Path) -> None:
    class Own(Told):
        tools = Spelling().tools

    answers = [[7, 8], Results([{"role": "tool", "content": "ab"}], 1)]
    environment = Own(lambda turn: answers[turn.number - 1])
    spoken = Spoken("qwen", policy_folder, environment)
    said = [*spoken.ids(spoken.call("spell", '{"word": "ab"}')), spoken.end_id]
    once = await spoken.answers.to(spoken.after(*said))
    assert (segments(once)[2], once.calls, once.wrong_calls) == ([7, 8], 1, 0)
    twice = await spoken.answers.to(once.responded(sample_of(*said)))
    assert (segments(twice)[4], twice.calls, twice.wrong_calls) == (spoken.following("ab"), 2, 1)
    assert [turn.calls for turn in environment.turns] == [(Call("spell", {"word": "ab"}),)] * 2
