import json
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from orchestrator.config.data import DataConfig
from orchestrator.data.prompts import PromptSet, check_disjoint, load_prompts
from orchestrator.evaluation.rows import RowFile
from quartet.config.base import ConfigError
from quartet.wire.pairs import label_of

VOCABULARY = ["<pad>", "<bos>", "<unk>", "a", "b", "c", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role != 'user' %}{{ raise_exception('users only') }}{% endif %}"
    "<user> {{ message.content }} {% if message.name is defined %}c {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template: str | None = None, *, bos: bool = True) -> Any:
    """Words of VOCABULARY, id by position; <bos> in front of plain text."""
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        model.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", bos_token="<bos>")
    wrapped.chat_template = template
    return wrapped


def jsonl(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def letters(path: Path, count: int) -> Path:
    """`count` rows; row i is i + 1 times "a", so that its length tells the row."""
    return jsonl(path, [{"prompt": " ".join(["a"] * (row + 1))} for row in range(count)])


def config(path: Path, **fields: Any) -> DataConfig:
    return DataConfig(path=str(path), **fields)


def rows(loaded: PromptSet) -> list[int]:
    return [prompt.row for prompt in loaded.prompts]


def fails(message: str) -> Any:
    return pytest.raises(ConfigError, match=re.escape(message))


def test_text_is_tokenised_with_special_tokens_and_labels_become_text(tmp_path: Path) -> None:
    data = jsonl(
        tmp_path / "sums.jsonl",
        [
            {"prompt": "a b", "answer": 42},
            {"prompt": "c x", "answer": "2024-05-01"},
            {"prompt": "b", "answer": None},
            {"prompt": "b"},
        ],
    )
    loaded = load_prompts(config(data, label_key="answer"), tokenizer(), "train")
    assert [prompt.prompt_ids.tolist() for prompt in loaded.prompts] == [[1, 3, 4], [1, 5, 2], [1, 4], [1, 4]]
    assert loaded.prompts[0].prompt_ids.dtype == np.int32
    assert [prompt.text for prompt in loaded.prompts] == ["a b", "c x", "b", "b"]
    # A label that looks like a date stays the text it was.
    assert [prompt.label for prompt in loaded.prompts] == ["42", "2024-05-01", "", ""]
    assert (loaded.name, loaded.too_long) == ("train", 0)


def test_labels_are_json_as_in_rows_that_are_evaluated_and_dates_of_a_table_are_text(tmp_path: Path) -> None:
    """A list of tests as Python writes it would be one test, a list literal, which any program passes."""
    labels = [["assert f(1) == 2", "é"], {"inputs": ["1"], "outputs": [None]}, True, 1.5]
    data = jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "label": label} for label in labels])
    loaded = load_prompts(config(data, label_key="label"), tokenizer(), "train")
    assert [prompt.label for prompt in loaded.prompts] == [
        '["assert f(1) == 2", "é"]',
        '{"inputs": ["1"], "outputs": [null]}',
        "true",
        "1.5",
    ]
    with RowFile(data) as rows:
        assert [row.label for row in (rows[0], rows[1], rows[2], rows[3])] == [each.label for each in loaded.prompts]
    assert (label_of(date(2024, 5, 1)), label_of([date(2024, 5, 1)])) == ("2024-05-01", '["2024-05-01"]')


def test_without_a_label_key_labels_are_empty(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "label": "x"}])
    assert load_prompts(config(data), tokenizer(), "train").prompts[0].label == ""


def test_further_columns_are_kept_as_json_has_them(tmp_path: Path) -> None:
    tests = [{"in": "1", "out": [2.5, None]}, {}]
    data = jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "tests": each, "more": "x", "rest": 1} for each in tests])
    loaded = load_prompts(config(data, columns=("tests", "more")), tokenizer(), "train")
    assert [prompt.columns for prompt in loaded.prompts] == [{"tests": each, "more": "x"} for each in tests]
    assert [prompt.columns for prompt in load_prompts(config(data), tokenizer(), "train").prompts] == [{}, {}]
    with fails("data.columns.1: no column 'nothing' in"):
        load_prompts(config(data, columns=("tests", "nothing")), tokenizer(), "train")
    half = tmp_path / "half.jsonl"
    half.write_text(r'{"prompt": "a", "tests": ["\ud800"]}')
    with fails("line 1: column 'tests': character 2, \\ud800, is half of a character; remove it"):
        load_prompts(config(half, columns=("tests",)), tokenizer(), "train")
    parquet = tmp_path / "p.parquet"
    Dataset.from_dict({"prompt": ["a"], "tests": [b"1"]}).to_parquet(parquet)
    with fails(
        "p.parquet, row 0: column 'tests' holds what JSON cannot: Object of type bytes is not JSON serializable"
    ):
        load_prompts(config(parquet, columns=("tests",)), tokenizer(), "train")


def test_tasks_become_text_and_are_few(tmp_path: Path) -> None:
    kinds = ["sum", 7, None, "sum"]
    data = jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "kind": kind} for kind in kinds])
    loaded = load_prompts(config(data, task_key="kind"), tokenizer(), "train")
    assert [prompt.task for prompt in loaded.prompts] == ["sum", "7", "", "sum"]
    assert {prompt.task for prompt in load_prompts(config(data), tokenizer(), "train").prompts} == {""}
    with fails("data.task_key: no column 'sort' in"):
        load_prompts(config(data, task_key="sort"), tokenizer(), "train")
    most = jsonl(tmp_path / "most.jsonl", [{"prompt": "a", "kind": kind} for kind in [*range(64), None]])
    assert len(load_prompts(config(most, task_key="kind"), tokenizer(), "train").prompts) == 65
    many = jsonl(tmp_path / "many.jsonl", [{"prompt": "a", "kind": kind} for kind in range(65)])
    with fails("has 65 different values, each of which would be measured by itself; 64 are the most"):
        load_prompts(config(many, task_key="kind"), tokenizer(), "train")


def test_long_prompts_are_dropped_and_counted_and_rows_stay_those_of_the_file(tmp_path: Path) -> None:
    data = letters(tmp_path / "p.jsonl", 5)
    # Lengths with <bos> are 2, 3, 4, 5, 6.
    loaded = load_prompts(config(data, max_prompt_length=4), tokenizer(), "train[1:]")
    assert (rows(loaded), loaded.too_long) == ([1, 2], 2)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(11)),
        ("train[:4]", range(4)),
        ("train[4:]", range(4, 11)),
        ("train[2:5]", range(2, 5)),
        ("train[:]", range(11)),
        ("train[:11]", range(11)),
        # 90 % of 11 is 9.9, rounded down.
        ("train[:90%]", range(9)),
        ("train[90%:]", range(9, 11)),
        # 12.5 % is 1.375 and 50 % is 5.5.
        ("train[12.5%:50%]", range(1, 5)),
        ("train[2:100%]", range(2, 11)),
    ],
)
def test_ranges(tmp_path: Path, split: str, expected: range) -> None:
    loaded = load_prompts(config(letters(tmp_path / "p.jsonl", 11)), tokenizer(), split)
    assert rows(loaded) == list(expected)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("train[-5:]", "data split 'train[-5:]': should be a name, or a name with a range of row numbers"),
        ("train[:x]", "of percentages up to 100%: train, train[100:200], train[500:], train[:90%]"),
        ("train[5]", "data split 'train[5]': should be a name"),
        ("train[1:2:3]", "data split 'train[1:2:3]': should be a name"),
        ("", "data split '': should be a name"),
        ("train[4:4]", "data split 'train[4:4]': the range is rows 4 to 4 (the end not included), but"),
        ("train[4:2]", "the range is rows 4 to 2"),
        ("train[:12]", "but the split holds 11 rows; it should start before it ends and end at 11 or before"),
        ("train[:101%]", "data split 'train[:101%]': should be a name"),
        ("train[20:]", "the range is rows 20 to 11"),
    ],
)
def test_bad_ranges(tmp_path: Path, split: str, message: str) -> None:
    with fails(message):
        load_prompts(config(letters(tmp_path / "p.jsonl", 11)), tokenizer(), split)


def test_shuffling_comes_before_the_range_and_is_the_same_for_every_range(tmp_path: Path) -> None:
    settings = config(letters(tmp_path / "p.jsonl", 20), split_seed=3)
    everything = rows(load_prompts(settings, tokenizer(), "train"))
    first = load_prompts(settings, tokenizer(), "train[:75%]")
    rest = load_prompts(settings, tokenizer(), "train[75%:]")
    assert sorted(everything) == list(range(20))
    assert everything != list(range(20))
    assert rows(first) + rows(rest) == everything
    # The row is still that of the file: row i has i + 1 letters and <bos>.
    assert all(len(prompt.prompt_ids) == prompt.row + 2 for prompt in first.prompts)
    other = config(tmp_path / "p.jsonl", split_seed=4)
    assert rows(load_prompts(other, tokenizer(), "train")) != everything


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "split 'train': holds no rows"),
        ('{"prompt": "a"}\n\n{"prompt": null}\n', "p.jsonl, line 3: column 'prompt' should hold text, got null"),
        ('{"prompt": ["a"]}\n', "should hold text, got ['a']; for chat messages set data.chat_template"),
    ],
)
def test_rows_that_are_not_prompts(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with fails(message):
        load_prompts(config(tmp_path / "p.jsonl"), tokenizer(), "train")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (7, "column 'prompt' should hold text or a list of messages, each with a role and content, got 7"),
        ([{"role": "user", "content": 7}], "column 'prompt'[0].content should be text, got 7"),
        # A template of plain texts would write the list as Python does.
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "column 'prompt'[0].content should be text"),
    ],
)
def test_messages_that_are_not_text(tmp_path: Path, messages: object, message: str) -> None:
    data = jsonl(tmp_path / "p.jsonl", [{"prompt": messages}])
    with fails(f"{data}, line 1: {message}"):
        load_prompts(config(data, chat_template=True), tokenizer(TEMPLATE), "train")


def test_missing_columns_are_named_with_those_there_are(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "p.jsonl", [{"question": "a"}, {"answer": "b"}])
    with fails("data.input_key: no column 'prompt'"):
        load_prompts(config(data), tokenizer(), "train")
    with fails("the columns are question, answer"):
        load_prompts(config(data), tokenizer(), "train")
    with fails("data.label_key: no column 'label'"):
        load_prompts(config(data, input_key="question", label_key="label"), tokenizer(), "train")


def test_nothing_left_nothing_in_a_prompt_and_the_wrong_vocabulary(tmp_path: Path) -> None:
    data = letters(tmp_path / "p.jsonl", 3)
    with fails("no prompt left of 3: all are longer than data.max_prompt_length (1 tokens)"):
        load_prompts(config(data, max_prompt_length=1), tokenizer(), "train")
    # The largest id is that of "a", 3.
    assert len(load_prompts(config(data), tokenizer(), "train", vocab_size=4).prompts) == 3
    with fails("line 1: the tokenizer gives id 3, outside the policy's vocabulary (0 to 2); use the tokenizer"):
        load_prompts(config(data), tokenizer(), "train", vocab_size=3)
    blank = jsonl(tmp_path / "blank.jsonl", [{"prompt": "a"}, {"prompt": " "}])
    with fails("blank.jsonl, line 2: the prompt ' ' has no tokens"):
        load_prompts(config(blank), tokenizer(bos=False), "train")


def test_the_chat_template_renders_text_and_messages_alike(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    data = jsonl(tmp_path / "p.jsonl", [{"prompt": "a b"}, {"prompt": messages}])
    chat = tokenizer(TEMPLATE)
    loaded = load_prompts(config(data, chat_template=True), chat, "train")
    assert [prompt.text for prompt in loaded.prompts] == [
        "<user> a b <assistant>",
        "<user> a <user> b <assistant>",
    ]
    # The template decides on special tokens: no <bos>.
    assert [prompt.prompt_ids.tolist() for prompt in loaded.prompts] == [[6, 3, 4, 7], [6, 3, 6, 4, 7]]
    expected = chat.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert loaded.prompts[1].prompt_ids.tolist() == expected


def test_keys_that_arrow_filled_with_null_do_not_reach_the_template(tmp_path: Path) -> None:
    plain, named = {"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "c"}
    Dataset.from_list([{"prompt": [plain]}, {"prompt": [named]}]).save_to_disk(tmp_path)
    loaded = load_prompts(config(tmp_path, chat_template=True), tokenizer(TEMPLATE), "train")
    assert [prompt.text for prompt in loaded.prompts] == ["<user> a <assistant>", "<user> b c <assistant>"]


def test_bad_chats(tmp_path: Path) -> None:
    def load(prompt: object, template: str | None = TEMPLATE) -> None:
        data = jsonl(tmp_path / "p.jsonl", [{"prompt": prompt}])
        load_prompts(config(data, chat_template=True), tokenizer(template), "train")

    with fails("data.chat_template: the tokenizer has none; turn it off or use a chat model's"):
        load("a", template=None)
    for prompt in ([], None, 3, ["a"], [{"role": "user"}]):
        with fails("line 1: column 'prompt' should hold text or a list of messages, each with a role and content"):
            load(prompt)
    with fails("line 1: the chat template refuses the messages: users only"):
        load([{"role": "system", "content": "a"}])


def test_training_and_held_out_rows_must_differ(tmp_path: Path) -> None:
    settings = config(letters(tmp_path / "p.jsonl", 10))
    train, held_out, mixed = (load_prompts(settings, tokenizer(), f"train[{r}]") for r in (":8", "8:", "6:9"))
    check_disjoint(train, held_out)
    with fails(
        "data.prompt_split 'train[:8]' and data.eval_split 'train[6:9]' share 2 row(s) of 'train', "
        "row 6 for one; choose ranges that do not overlap, for instance train[:90%] and train[90%:]"
    ):
        check_disjoint(train, mixed)
    check_disjoint(train, PromptSet("eval[:8]", train.prompts, 0))


@pytest.mark.parametrize("column", ["prompt", "label"])
def test_half_a_character_is_refused(tmp_path: Path, column: str) -> None:
    """JSON can name one; it cannot be written as UTF-8, in which the journal keeps labels."""
    path = jsonl(
        tmp_path / "p.jsonl", [{"prompt": "a", "label": "b"}, {"prompt": "a", "label": "b", column: "a\ud800"}]
    )
    with fails(f"{path}, line 2: column {column!r}: character 1, \\ud800, is half of a character; remove it"):
        load_prompts(config(path, label_key="label"), tokenizer(), "train")
