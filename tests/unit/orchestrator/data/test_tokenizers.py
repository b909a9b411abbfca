"""Prompts and texts by the tokenizers of published models: pieces, and a token that goes before a text by itself."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from orchestrator.config.data import DataConfig
from orchestrator.data.prompts import load_prompts
from protos import reward_pb2 as pb
from quartet.config.base import ConfigError
from quartet.models.loading import load_tokenizer
from quartet.serving.share import UNKNOWN
from services.reward.encoding import Encoder, Received
from tests.families import FAMILIES
from tests.models import BOS, EOS, MAX_LENGTH, WORDS
from tests.trajectories import of

TEXT = "w12 w5 w12"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.mark.parametrize(
    ("name", "before"),
    [("bos", 1), ("unigram", 0), ("gpt2", 0)],
)
def test_a_prompt_is_tokenised_once_and_scorers_see_its_text(name: str, before: int, tmp_path: Path) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    tokenizer.chat_template = TEMPLATE
    rows = [[{"role": "user", "content": TEXT}], TEXT]
    for chat, row in zip((True, False), rows, strict=True):
        file = tmp_path / f"{chat}.jsonl"
        file.write_text(json.dumps({"prompt": row}) + "\n")
        config = DataConfig.parse({"path": str(file), "chat_template": chat}, "data")
        [prompt] = load_prompts(config, tokenizer, "train").prompts
        ids = prompt.prompt_ids.tolist()
        # The template writes the token itself, and the tokenizer adds none to it.
        assert ids.count(BOS) == (1 if chat else before)
        assert BOS not in ids[1:]
        response = np.asarray([*tokenizer("w7 w9", add_special_tokens=False).input_ids, EOS], np.int32)
        request = pb.ScoreRequest(tokens=of([prompt.prompt_ids], [response]).pack())
        [scored] = Encoder(tokenizer, len(WORDS), MAX_LENGTH).call(Received(request), UNKNOWN).items([0])
        assert (scored.pair.prompt.strip(), scored.pair.response) == (TEXT, "w7 w9")


@pytest.mark.parametrize("texts", [1, 20])
def test_a_regular_expression_without_end_is_one_line_that_names_the_tokenizer(tmp_path: Path, texts: int) -> None:
    """tokenizers panics after some millions of tries, with a class of its own that derives from BaseException."""
    endless = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    endless.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=endless, unk_token="<unk>").save_pretrained(tmp_path / "mine")
    (tmp_path / "train.jsonl").write_text((json.dumps({"prompt": "a" * 60 + "b"}) + "\n") * texts)
    config = DataConfig.parse({"path": str(tmp_path)}, "data")
    said = rf"^the tokenizer of {tmp_path / 'mine'} fails on prompts of data\.path .*: .*retry-limit"
    with pytest.raises(ConfigError, match=said):
        load_prompts(config, load_tokenizer(str(tmp_path / "mine")), "train")
