"""The labels of preferences, and the reward model that learns them."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

from quartet.wire.pairs import Pair
from recipes.common.llama import write_tiny
from recipes.common.sampling import EncodedPair, encode
from recipes.common.shape import Shape
from recipes.common.tokenizer import EOS_ID, word_tokenizer
from recipes.reviews.grammar import WORDS
from recipes.reviews.preferences import Preference, prefer
from recipes.reviews.reward_model import reward_scores, train_reward_model
from recipes.reviews.settings import Settings

pytestmark = pytest.mark.processes

PROMPT = "write a short review of the phone for students :"
TINY = Shape(hidden=16, layers=1, heads=2)


def as_sample(response: str, ended: bool = True) -> EncodedPair:
    (encoded,) = encode([Pair(PROMPT, response, ended=ended)], word_tokenizer(WORDS, max_length=128))
    return encoded


def test_the_end_is_encoded_only_for_a_response_that_ended() -> None:
    assert as_sample("the .").response_ids[-1] == EOS_ID
    assert as_sample("the .", ended=False).response_ids.tolist() == as_sample("the .").response_ids[:-1].tolist()


def test_a_reader_prefers_by_bradley_and_terry() -> None:
    better, worse = as_sample("the price is fair ."), as_sample("the price is okay .")  # 0.75 and -0.25
    first, second = [better] * 4000, [worse] * 4000
    preferences = prefer(first, second, sharpness=2.0, rng=random.Random(0))
    right = sum(preference.chosen is better for preference in preferences) / 4000
    assert right == pytest.approx(0.8808, abs=0.02)  # 1 / (1 + exp(-2 x 1.0))
    for preference in preferences:
        assert preference.margin == (1.0 if preference.chosen is better else -1.0)
        assert preference.rejected is (worse if preference.chosen is better else better)


def test_a_reader_has_no_preference_between_equals() -> None:
    fair, cheap = as_sample("the price is fair ."), as_sample("the price is cheap .")
    steep = as_sample("the price is steep .")
    (preference,) = prefer([fair, fair], [cheap, steep], sharpness=100.0, rng=random.Random(0))
    assert (preference.chosen, preference.rejected, preference.margin) == (fair, steep, 1.75)


def test_the_reward_model_learns_what_is_preferred(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = write_tiny(tmp_path / "policy", word_tokenizer(WORDS, max_length=128), TINY)
    settings = Settings(shape=TINY, reward_epochs=40, reward_batch=8, reward_rate=1e-2)
    liked, disliked = as_sample("the price is steep ."), as_sample("the price is fair .")
    train_reward_model(policy, [Preference(liked, disliked, margin=-1.75)] * 8, tmp_path / "reward", settings)
    high, low = reward_scores(tmp_path / "reward", [liked, disliked])
    assert high - low > 3
    model = LlamaForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    with torch.no_grad():
        ids = torch.tensor([[*liked.prompt_ids.tolist(), *liked.response_ids.tolist()]])
        assert high == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-5)


def test_an_end_is_written_only_for_a_response_that_ended() -> None:
    assert as_sample("the .").written == "the . <eos>"
    assert as_sample("the .", ended=False).written == "the ."
