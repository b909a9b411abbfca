"""The distribution that is sampled from: no mass on padding of the vocabulary, none on ends before their time."""

from pathlib import Path

import numpy as np
import pytest
import torch

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.columns import Columns
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.models.distribution import Distribution, end_ids
from quartet.models.sequences import PairTensors, concatenate_pairs, pad_pairs
from quartet.wire.codec import Floats
from quartet.wire.identity import vocabulary_size
from services.reference.config import ReferenceConfig
from services.reference.model import FrozenModel
from tests import plain
from tests.families import ENDS, FAMILIES
from tests.learner_batches import logprob_rows
from tests.models import EOS, ROWS, WORDS, make_policy, make_tokenizer

PROMPTS, RESPONSES = plain.random_pairs(6, seed=8, longest=12)
VOCABULARY = 8


def by_hand(logits: torch.Tensor, ids: list[int], distribution: Distribution) -> tuple[list[float], list[float]]:
    """Log-probs of the tokens of one response and the entropies, from logits [T, V]."""
    logprobs, entropies = [], []
    for step, (row, token) in enumerate(zip(logits.double() / distribution.temperature, ids, strict=True)):
        early = distribution.end_ids if step < distribution.min_new_tokens else ()
        possible = [i for i in range(distribution.vocabulary or len(row)) if i not in early]
        every = row[possible].log_softmax(-1)
        logprobs.append(float(every[possible.index(token)]))
        entropies.append(float(-(every.exp() * every).sum()))
    return logprobs, entropies


def random_pairs(make: str) -> tuple[PairTensors, list[np.ndarray]]:
    """Responses that the distributions below can sample."""
    rng = np.random.default_rng(2)
    responses = [rng.integers(4, VOCABULARY, length).astype(np.int32) for length in (5, 1, 3)]
    prompts = [np.full(length, 5, np.int32) for length in (2, 4, 1)]
    return {"padded": pad_pairs, "packed": concatenate_pairs}[make](prompts, responses), responses


DISTRIBUTIONS = [
    Distribution(0.7),
    Distribution(0.7, vocabulary=VOCABULARY),
    Distribution(1.0, min_new_tokens=2, end_ids=(0, 2)),
    Distribution(1.3, vocabulary=VOCABULARY, min_new_tokens=9, end_ids=(1,)),
    # Ends that are padding, and that the model does not have: as if they were not named.
    Distribution(1.0, vocabulary=VOCABULARY, min_new_tokens=2, end_ids=(0, 9, 20)),
    Distribution(1.0, min_new_tokens=2, end_ids=(20,)),
]


@pytest.mark.parametrize("make", ["padded", "packed"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_it_is_that_by_hand(make: str, distribution: Distribution) -> None:
    pairs, responses = random_pairs(make)
    logits = torch.randn(*pairs.action_mask.shape, 11, generator=torch.Generator().manual_seed(0)) * 3
    actual = pairs.unpad(distribution.logprobs(logits, pairs))
    both = [pairs.unpad(part) for part in distribution.with_entropy(logits, pairs)]
    rows = logits[pairs.action_mask].split(pairs.lengths)
    for index, (row, ids) in enumerate(zip(rows, responses, strict=True)):
        logprobs, entropies = by_hand(row, ids.tolist(), distribution)
        assert actual[index].tolist() == pytest.approx(logprobs, abs=1e-5)
        assert both[0][index].tolist() == pytest.approx(logprobs, abs=1e-5)
        assert both[1][index].tolist() == pytest.approx(entropies, abs=1e-5)


@pytest.mark.parametrize("factor", [1.0, 1.5, 1e6])
def test_what_has_no_mass_gets_no_gradient(factor: float) -> None:
    """Whatever the entropy is multiplied with."""
    pairs, _ = random_pairs("padded")
    logits = torch.randn(*pairs.action_mask.shape, 11, requires_grad=True)
    distribution = Distribution(vocabulary=VOCABULARY, min_new_tokens=1, end_ids=(2,))
    logprobs, entropies = distribution.with_entropy(logits, pairs)
    (logprobs + factor * entropies).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[..., VOCABULARY:].any()
    assert not logits.grad[:, 0, 2].any()
    assert logits.grad[:, 1:, 2].any()


def test_a_token_without_mass_that_is_asked_for_gets_a_finite_number() -> None:
    pairs = pad_pairs([np.asarray([5], np.int32)], [np.asarray([2, 10, 4], np.int32)])
    distribution = Distribution(vocabulary=VOCABULARY, min_new_tokens=1, end_ids=(2,))
    logits = torch.randn(1, 3, 11)
    actual = distribution.logprobs(logits, pairs)[0]
    possible = logits[0, 1, :VOCABULARY]
    assert actual.isfinite().all()
    assert float(actual[1]) == pytest.approx(float(logits[0, 1, 10] - possible.logsumexp(-1)), abs=1e-5)


def test_the_gradient_of_a_token_without_mass_is_that_of_its_logit_less_the_normaliser() -> None:
    """Ids 10, padding, and 2, an end that comes too early; 4 may always be sampled."""
    pairs = pad_pairs([np.asarray([5], np.int32)], [np.asarray([2, 10, 4], np.int32)])
    distribution = Distribution(0.5, vocabulary=VOCABULARY, min_new_tokens=1, end_ids=(2,))
    logits = torch.randn(1, 3, 11, dtype=torch.float64, requires_grad=True)
    actual = distribution.logprobs(logits, pairs)
    scaled = logits[0] / 0.5
    possible = [[i for i in range(VOCABULARY) if i != 2], list(range(VOCABULARY)), list(range(VOCABULARY))]
    expected = torch.stack(
        [row[i] - row[p].logsumexp(-1) for row, i, p in zip(scaled, (2, 10, 4), possible, strict=True)]
    )
    torch.testing.assert_close(actual[0], expected)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    [gradient] = torch.autograd.grad((actual[0] * weights).sum(), logits, retain_graph=True)
    [wanted] = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(gradient, wanted)


def learner_logprobs(folder: Path, distribution: Distribution, **options: bool) -> list[Floats]:
    config = PolicyConfig(model=str(folder), optimizer=OptimizerConfig(learning_rate=1e-4), **options)  # type: ignore[arg-type]
    return logprob_rows(PolicyTrainer(config, PPO(), distribution), PROMPTS, RESPONSES)


def test_learner_and_reference_leave_out_the_padding_of_a_vocabulary(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2.5"].make(tmp_path / "policy")
    distribution = Distribution(0.9, vocabulary=len(WORDS), min_new_tokens=3, end_ids=(EOS,))
    model = plain.language_model(folder)
    assert model.config.vocab_size == ROWS
    frozen = FrozenModel(ReferenceConfig(model=str(folder), dtype="float32"), torch.device("cpu"))
    reference = logprob_rows(frozen, PROMPTS, RESPONSES, distribution)
    actual = learner_logprobs(folder, distribution)
    assert plain.furthest(reference, actual) < 1e-5
    assert plain.furthest(learner_logprobs(folder, distribution, packing=True), actual) < 1e-5
    for index, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        expected = [
            None if step < 3 and token == EOS else by_hand(logits[step : step + 1], [int(token)], _at(step))[0][0]
            for step, token in enumerate(response)
        ]
        for value, wanted in zip(actual[index].tolist(), expected, strict=True):
            assert wanted is None or value == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_ends_are_left_out_before_their_time_in_each_segment_that_was_sampled(
    policy_folder: Path, packing: bool
) -> None:
    """An engine samples each segment in a call of its own, from all tokens before it."""
    distribution = Distribution(0.9, vocabulary=len(WORDS), min_new_tokens=2, end_ids=(EOS,))
    rng = np.random.default_rng(4)
    turns = [
        [rng.integers(4, 64, length).astype(np.int32) for length in row]
        for row in ((3, 4, 2, 5), (2, 3), (1, 1, 3, 2, 1, 4))
    ]
    parts = [part for row in turns for part in row]
    marks = np.concatenate([np.full(len(part), at % 2 == 1) for row in turns for at, part in enumerate(row)])
    lengths = [sum(map(len, row)) for row in turns]
    columns = Columns.of(np.concatenate(parts), np.asarray(lengths, np.int32), marks)
    config = PolicyConfig(
        model=str(policy_folder),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        packing=packing,
        micro_batch_tokens=20,
    )
    learner = PolicyTrainer(config, PPO(), distribution)
    actual = learner.logprobs(columns)
    calls = [(np.concatenate(row[:at]), row[at]) for row in turns for at in range(1, len(row), 2)]
    expected = np.concatenate(
        [learner.logprobs(Columns.of_pairs([prompt], [response])) for prompt, response in calls]
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    frozen = FrozenModel(
        ReferenceConfig(model=str(policy_folder), dtype="float32", packing=packing, batch_tokens=20),
        torch.device("cpu"),
    )
    np.testing.assert_allclose(frozen.logprobs(columns, distribution), expected, atol=1e-5)


def _at(step: int) -> Distribution:
    return Distribution(0.9, vocabulary=len(WORDS), min_new_tokens=int(step < 3), end_ids=(EOS,))


def test_what_ends_a_text_is_read_from_the_models_folder(tmp_path: Path) -> None:
    assert vocabulary_size(make_tokenizer()) == len(WORDS)
    several = FAMILIES["llama3"].make(tmp_path / "several")
    assert end_ids(str(several), make_tokenizer()) == tuple(ENDS)
    (several / "generation_config.json").unlink()
    assert end_ids(str(several), make_tokenizer()) == tuple(ENDS)  # as the model's configuration says
    one = make_policy(tmp_path / "one", kind="llama", tied=True)
    assert end_ids(str(one), make_tokenizer()) == (EOS,)
