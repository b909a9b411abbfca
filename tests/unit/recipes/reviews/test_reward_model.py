"""The labels of preferences, and the reward model that learns them."""

import random

import pytest
import torch

from quartet.wire.pairs import Pair
from recipes.common.llama import tiny_policy
from recipes.common.sampling import EncodedPair, encode
from recipes.common.shape import Shape
from recipes.common.tokenizer import EOS_ID, word_tokenizer
from recipes.reviews.grammar import WORDS
from recipes.reviews.preferences import Preference, prefer
from recipes.reviews.reward_model import reward_model_from, reward_scores, train_reward_model
from recipes.reviews.settings import Settings

pytestmark = pytest.mark.processes

PROMPT = "write a short review of the phone for students :"
TINY = Shape(hidden=16, layers=1, heads=2)


def as_sample(response: str, ended: bool = True) -> EncodedPair:
    (encoded,) = encode([Pair(PROMPT, response, ended=ended)], word_tokenizer(WORDS, max_length=128))
    return encoded


def test_the_end_is_encoded_only_for_a_response_that_ended() -> None:
    assert as_sample("the .").response_ids[-1] == EOS_ID
    assert as_sample("the .", ended=False).response_ids == as_sample("the .").response_ids[:-1]


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


def test_a_raw_score_is_the_head_at_the_last_token_whatever_the_padding() -> None:
    torch.manual_seed(0)
    policy = tiny_policy(len(WORDS) + 4, TINY)
    model = reward_model_from(policy, Settings(shape=TINY)).eval()
    short = EncodedPair(Pair("", ""), [1, 5], [6, 0])  # ends in a padding token of its own
    long = EncodedPair(Pair("", ""), [1, 5], [6, 7, 8, 9, EOS_ID])
    together = reward_scores(model, [short, long])
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([short.ids])).last_hidden_state
        expected = (hidden[0, 3] * model.score.weight[0]).sum()
    assert together.shape == (2,)
    assert together[0].item() == pytest.approx(expected.item(), abs=1e-6)
    assert together[1].item() == pytest.approx(reward_scores(model, [long]).item(), abs=1e-6)


def test_the_reward_model_learns_what_is_preferred() -> None:
    torch.manual_seed(0)
    settings = Settings(shape=TINY, reward_epochs=40, reward_batch=8, reward_rate=1e-2)
    model = reward_model_from(tiny_policy(len(WORDS) + 4, TINY), settings)
    liked, disliked = as_sample("the price is steep ."), as_sample("the price is fair .")
    preferences = [Preference(liked, disliked, margin=-1.75)] * 8
    loss = train_reward_model(model, preferences, settings, random.Random(0))
    high, low = reward_scores(model, [liked, disliked]).tolist()
    assert high - low > 3
    assert loss < 0.05  # log(1 + exp(-3)) = 0.049


def test_the_reward_model_starts_from_the_policys_body() -> None:
    policy = tiny_policy(len(WORDS) + 4, TINY)
    model = reward_model_from(policy, Settings(shape=TINY))
    body = policy.model.state_dict()
    assert model.model.state_dict().keys() == body.keys()
    assert all(torch.equal(weight, body[name]) for name, weight in model.model.state_dict().items())
    assert model.score.weight.shape == (1, 16)
