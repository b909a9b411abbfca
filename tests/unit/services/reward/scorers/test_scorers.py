"""Scorers: a model, a function, and several by name."""

import asyncio
import hashlib
import inspect
import json
import logging.handlers
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForSequenceClassification

from protos import reward_pb2 as pb
from quartet.config.base import ConfigError
from quartet.models.sequences import PairTensors
from quartet.serving.batcher import HungError, SpoiltError
from quartet.wire.errors import FailedPrecondition
from quartet.wire.identity import model_hash
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import Pair
from services.reward.config import RewardConfig, ScorerConfig
from services.reward.kinds import FunctionScorerConfig
from services.reward.replica import Reward
from services.reward.scorers.make import SeveralScorers, make_scorer
from services.reward.scorers.scorer import EncodedPair, InParts, Result, Scorer
from tests import plain
from tests.models import MAX_LENGTH, REWARD_MEAN, REWARD_STD, WORDS, make_reward, make_tokenizer
from tests.unit.naive import PROMPTS, RESPONSES, arrays
from tests.unit.rows import grouped
from tests.unit.virtual_time import VirtualLoop
from tests.unit.waiting import settled, until

PAIRS = [
    EncodedPair(prompt, response, Pair(prompt="", response=" ".join(WORDS[i] for i in response), label="w13 <pad>"))
    for prompt, response in zip(arrays(PROMPTS), arrays(RESPONSES), strict=True)
]
LENGTHS = [2.0, 4.0, 1.0, 3.0]
FIRST = f"prompt '', response '{PAIRS[0].pair.response}'"
"""The first pair, as errors name it."""
SOURCE = hashlib.sha256((Path(__file__).parents[4] / "scorers.py").read_bytes()).hexdigest()


def make(**config: Any) -> Scorer:
    parsed: Any = TypeAdapter(ScorerConfig).validate_python(config)
    return make_scorer(parsed, make_tokenizer(), torch.device("cpu"))


def function(name: str) -> dict[str, str]:
    return {"kind": "function", "function": f"tests.scorers:{name}"}


def scored(scorer: Scorer, pairs: Sequence[EncodedPair] = PAIRS) -> Sequence[Result]:
    """The results, of a scorer that computes here or in processes of its own."""
    found: Any = scorer.score(pairs)
    return asyncio.run(found) if inspect.iscoroutine(found) else found  # type: ignore[no-any-return]


def single(scorer: Scorer, pairs: Sequence[EncodedPair] = PAIRS) -> np.ndarray:
    """The scores, [B], of a scorer that names none."""
    scores = table(scorer, pairs)
    assert (scorer.names, scores.shape) == ((), (len(pairs), 1))
    assert scores.dtype == np.float32
    return scores[:, 0]


def table(scorer: Scorer, pairs: Sequence[EncodedPair] = PAIRS) -> np.ndarray:
    """The scores, [B, K], all of which there are."""
    results = scored(scorer, pairs)
    assert not [each for each in results if isinstance(each, Unscored)]
    return np.asarray(results)


@torch.no_grad()
def raw_scores(folder: Path) -> np.ndarray:
    """The head at each pair's last token, one pair at a time, by Hugging Face's own class."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [torch.tensor([prompt + response]) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    return np.asarray([float(model.score(model.model(row).last_hidden_state)[0, -1, 0]) for row in rows])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("batch_tokens", [1, 12, 1000])
def test_a_model_scores_the_last_token_normalised_as_its_config_says(
    reward_folder: Path, batch_tokens: int, packing: bool
) -> None:
    options = {"dtype": "float32", "batch_tokens": batch_tokens, "packing": packing}
    scorer = make(kind="model", model=str(reward_folder), **options)
    actual = single(scorer)
    expected = (raw_scores(reward_folder) - REWARD_MEAN) / REWARD_STD
    assert actual.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert scorer.max_length == MAX_LENGTH
    assert scorer.identity == pb.ScorerIdentity(
        name=f"model:{reward_folder.name}", model_hash=model_hash(reward_folder)
    )


def test_a_prompt_is_computed_once_for_its_responses(reward_folder: Path) -> None:
    scorer: Any = make(kind="model", model=str(reward_folder), dtype="float32", packing=True)
    prompts, responses = grouped(10, size=5)
    computed, forward = [], scorer._model.forward

    def counted(pairs: PairTensors) -> torch.Tensor:
        computed.append(pairs.input_ids.numel())
        return forward(pairs)

    scorer._model.forward = counted
    actual = single(scorer, [EncodedPair(*pair, Pair("", "")) for pair in zip(prompts, responses, strict=True)])
    assert computed == [2 * 30 + sum(map(len, responses))]
    assert plain.furthest(actual, plain.scores(reward_folder, prompts, responses)) < 1e-5
    scorer.check()  # by a pass over one pair
    assert computed[1:] == [2]


def test_packing_is_refused_where_attention_has_a_window(reward_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "windowed"
    shutil.copytree(reward_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 4}))
    assert single(make(kind="model", model=str(folder), dtype="float32")).shape == (4,)
    with pytest.raises(ConfigError, match=r"^packing: .*windowed \(llama\) has layers without plain causal"):
        make(kind="model", model=str(folder), dtype="float32", packing=True)


def test_normalisation_can_be_turned_off(reward_folder: Path) -> None:
    scorer = make(kind="model", model=str(reward_folder), dtype="float32", normalise=False)
    assert single(scorer).tolist() == pytest.approx(raw_scores(reward_folder).tolist(), abs=1e-5)


def test_half_precision_is_near(reward_folder: Path) -> None:
    scorer = make(kind="model", model=str(reward_folder), normalise=False)
    assert single(scorer).tolist() == pytest.approx(raw_scores(reward_folder).tolist(), abs=0.05)


def test_an_offloaded_model_gives_the_same_scores(reward_folder: Path) -> None:
    kept, offloaded = (make(kind="model", model=str(reward_folder), offload=offload) for offload in (False, True))
    assert single(kept).tolist() == single(offloaded).tolist()
    offloaded.check()


def test_a_model_with_another_tokenizer_is_refused(reward_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(reward_folder, tmp_path / "other"))
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w17"', '"w017"'))
    with pytest.raises(ConfigError, match=r"^reward.args.scorer.model: the tokenizer of .* is not the service's"):
        make(kind="model", model=str(folder))


def test_a_model_of_two_labels_is_refused(tmp_path: Path) -> None:
    folder = make_reward(tmp_path / "two", labels=2)
    model, wrong = {"kind": "model", "model": str(folder)}, ".* has num_labels 2; it must have 1$"
    with pytest.raises(ConfigError, match=rf"^reward.args.scorer.model: {wrong}"):
        make(**model)
    with pytest.raises(ConfigError, match=rf"^reward.args.scorer.scorers.two.model: {wrong}"):
        make(kind="several", scorers={"two": model})
    named = RewardConfig.parse({"scorers": {"taste": model, "other": model}}, "reward.args").hosted["taste"]
    with pytest.raises(ConfigError, match=rf"^reward.args.scorers.taste.model: {wrong}"):
        Reward.func_or_class(named, name="taste")  # type: ignore[attr-defined]


def test_a_function_sees_texts_and_labels() -> None:
    scorer = make(**function("count"))
    assert single(scorer).tolist() == LENGTHS
    assert single(make(**function("tensor"), pair_timeout_s=200.0)).tolist() == LENGTHS  # it imports torch
    assert single(make(**function("matches"))).tolist() == [0, 0, 0, 0]
    prompt, response = arrays([[1], [13, 0]])
    hit = EncodedPair(prompt, response, Pair(prompt="", response="w13 <pad>", label="w13 <pad>"))
    assert single(make(**function("matches")), [hit]).tolist() == [1]
    name = "function:tests.scorers:count"
    assert scorer.identity == pb.ScorerIdentity(name=name, model_hash=SOURCE)
    assert FunctionScorerConfig(**function("count")).code_hash("scorer") == SOURCE  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "tests.scorers:too_few gave 3 scores for 4 pairs; should give one number each"),
        ("nested", f"tests.scorers:nested gave a list for {FIRST}; should give one number each"),
        ("nothing", "tests.scorers:nothing gave a NoneType for 4 pairs; should give one number each"),
        ("worded", f"tests.scorers:worded gave something that is no number for {FIRST}; should give one number each"),
    ],
)
def test_functions_that_do_not_score_are_named(name: str, message: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"^{message}$"):
        scored(make(**function(name)))


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("parsed", Outcome.FAILED, r"parsed raised JSONDecodeError in line \d+ of scorers.py; see the reward .*"),
        ("broken", Outcome.FAILED, r"broken raised KeyError in line \d+ of scorers.py; see the reward service's .*"),
        ("late", Outcome.TIMEOUT, r"late raised TimeoutError in line \d+ of scorers.py; see the reward .*"),
    ],
)
def test_a_function_that_raises_has_an_outcome_and_a_reason(name: str, outcome: Outcome, reason: str) -> None:
    with pytest.raises(SpoiltError) as caught:
        scored(make(**function(name)))
    assert caught.value.result.outcome is outcome
    assert re.fullmatch(f"tests.scorers:{reason}", caught.value.result.reason)
    with pytest.raises(SpoiltError) as caught:
        scored(make(kind="several", scorers={"words": function("count"), "own": function(name)}))
    assert caught.value.result.reason.startswith(f"own: tests.scorers:{name} raised")


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("not_finite", Outcome.NOT_FINITE, "tests.scorers:not_finite gave a score that is not finite in float32"),
        ("too_large", Outcome.NOT_FINITE, "tests.scorers:too_large gave a score that is not finite in float32"),
        ("declines", Outcome.NOT_APPLICABLE, "tests.scorers:declines gave None"),
    ],
)
def test_pairs_without_a_score_have_an_outcome_and_a_reason(name: str, outcome: Outcome, reason: str) -> None:
    assert scored(make(**function(name))) == [Unscored(outcome, reason)] * 4


def test_a_pair_with_a_wrong_answer_is_named_by_its_texts_wherever_it_is_in_a_call() -> None:
    prompt = f"{'a' * 5000} the question {'z' * 30}"
    asked, answer = arrays([[1], [2]])
    wrong = EncodedPair(asked, answer, Pair(prompt=prompt, response="a short answer", label="wrong"))
    named = r"for prompt 'a+\.\.\.uestion z+', response 'a short answer'; should give one number each$"
    with pytest.raises(FailedPrecondition, match=named) as caught:
        scored(make(**function("wrong_for_one")), [*PAIRS, wrong])
    assert len(str(caught.value)) < 300


def test_a_process_reward_is_a_score_and_its_parts() -> None:
    def pair(response: str, label: str = "") -> EncodedPair:
        return EncodedPair(PAIRS[0].prompt_ids, PAIRS[0].response_ids, Pair("", response, label))

    made = make(**function("odd_words"), process=True)
    assert made.identity.process
    first, nothing, plain = scored(made, [pair("w3 w4 w11"), pair("w3", "none"), pair("w4")])
    assert isinstance(first, InParts)
    assert (first.score.tolist(), first.places.tolist(), first.rewards.tolist()) == ([24.0], [2, 9], [3.0, 11.0])
    assert isinstance(nothing, Unscored)
    assert isinstance(plain, np.ndarray)  # a score without parts is a score
    assert plain.tolist() == [10.0]
    wrong = make(**function("wrong_process"), process=True)
    for parts, message in [
        (
            "[[3, 1]]",
            r"a part at 3 of 2 characters for prompt '', response 'w4'; should give one number or "
            "ProcessReward each$",
        ),
        ("[[0, 1]]", "a part at 0 of 2 characters"),
        ("[[1.5, 1]]", "a part that is no number of characters and reward"),
        ("[7]", "a part that is no number of characters and reward"),
        ("null", "parts that are a NoneType for"),
        ('[[1, "x"]]', "something that is no number for"),
    ]:
        with pytest.raises(FailedPrecondition, match=f"^tests.scorers:wrong_process gave {message}"):
            scored(wrong, [pair("w4", parts)])
    [infinite] = scored(wrong, [pair("w4", "[[1, 1e39], [2, -1e39]]")])
    assert isinstance(infinite, Unscored)
    assert infinite.outcome is Outcome.NOT_FINITE
    [merged] = scored(wrong, [pair("w4", "[[2, 1], [1, 5], [2, 0.5]]")])
    assert isinstance(merged, InParts)
    assert (merged.score.tolist(), merged.places.tolist(), merged.rewards.tolist()) == ([6.5], [2, 1], [1.5, 5.0])
    with pytest.raises(FailedPrecondition, match="gave a ProcessReward, which needs process: true, for"):
        scored(make(**function("odd_words")), [pair("w3")])
    with pytest.raises(ValueError, match="process: true, but scores with names are earned at the end"):
        make(**function("odd_words"), process=True, names=("a",))
    with pytest.raises(ValueError, match=r"scorers.a.process: true, but scores with names are earned at the end"):
        make(kind="several", scorers={"a": function("odd_words") | {"process": True}})


def test_a_function_says_itself_that_a_pair_is_not_scored() -> None:
    two, four, one, _ = PAIRS
    results = scored(make(**function("picky")), [two, one, four])
    told = [each.tolist() if isinstance(each, np.ndarray) else each for each in results]
    assert told == [[2.0], Unscored(Outcome.REFUSED, "one word is not judged"), [4.0]]
    several = make(kind="several", scorers={"words": function("count"), "picky": function("picky")})
    results = scored(several, [two, one])
    told = [each.tolist() if isinstance(each, np.ndarray) else each for each in results]
    assert told == [[2.0, 2.0], Unscored(Outcome.REFUSED, "picky: one word is not judged")]
    with pytest.raises(
        FailedPrecondition, match=f"says_scored gave an Unscored of outcome .* for {FIRST}; should give"
    ):
        scored(make(**function("says_scored")))
    [long] = scored(make(**function("says_much")), PAIRS[:1])
    assert isinstance(long, Unscored)
    assert len(long.reason) == 500
    long.reason.encode()


def test_functions_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match=r"tests\.scorers:absent"):
        make(**function("absent"))
    with pytest.raises(ConfigError, match="math:sqrt has no Python source to identify it by"):
        make(kind="function", function="math:sqrt")


def named(name: str, *names: str) -> dict[str, Any]:
    return function(name) | {"names": names}


def test_a_function_gives_several_scores_by_name() -> None:
    """In the order of the names, whatever the order of the mapping."""
    scorer = make(**named("two", "right", "words"))
    assert table(scorer).tolist() == [[0.0, length] for length in LENGTHS]
    assert table(make(**named("two", "words", "right"))).tolist() == [[length, 0.0] for length in LENGTHS]
    assert scorer.identity == pb.ScorerIdentity(
        name="function:tests.scorers:two", model_hash=SOURCE, names=["right", "words"]
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("count", f"gave a float for {FIRST}; should give for each pair a mapping of right, words to numbers"),
        ("one_name", f"gave right for {FIRST}; should give for each pair a mapping of right, words to numbers"),
        (
            "three_names",
            f"gave length, right, words for {FIRST}; should give for each pair a mapping of right, words .*",
        ),
        ("two_too_few", "gave 3 scores for 4 pairs; should give for each pair a mapping of right, words to numbers"),
        ("by_name", "gave a dict for 4 pairs; should give for each pair a mapping of right, words to numbers"),
        (
            "two_worded",
            f"gave something that is no number for {FIRST}; should give for each pair a mapping of right, .*",
        ),
    ],
)
def test_functions_whose_named_scores_are_wrong_are_named(name: str, message: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"^tests.scorers:{name} {message}$"):
        scored(make(**named(name, "right", "words")))


def test_a_pair_is_scored_by_all_names_or_by_none() -> None:
    *good, wrong = scored(make(**named("two_not_finite", "right", "words")))
    assert [each.tolist() for each in good if isinstance(each, np.ndarray)] == [[0.0, n] for n in LENGTHS[1:]]
    assert isinstance(wrong, Unscored)
    assert wrong.outcome is Outcome.NOT_FINITE


def test_several_scorers_give_the_scores_of_each_under_its_name(reward_folder: Path) -> None:
    model = {"kind": "model", "model": str(reward_folder), "dtype": "float32"}
    rules = {"kind": "several", "scorers": {"length": function("count")}}
    several = make(kind="several", scorers={"taste": model, "rules": rules, "both": named("two", "right", "words")})
    assert several.names == ("taste", "rules.length", "both.right", "both.words")
    assert (several.max_length, several.texts) == (MAX_LENGTH, True)
    taste, length, right, words = table(several).T.tolist()
    assert taste == single(make(**model)).tolist()
    assert length == words == LENGTHS
    assert right == [0] * 4
    assert (several.identity.name, tuple(several.identity.names)) == ("several", several.names)
    assert [part.name for part in several.identity.parts] == [
        f"model:{reward_folder.name}",
        "several",
        "function:tests.scorers:two",
    ]
    assert several.identity.parts[1].parts[0].model_hash == SOURCE
    other = make(kind="several", scorers={"taste": model, "rules": rules})
    assert other.identity.model_hash != several.identity.model_hash


class Gated:
    """A model that computes until it is let go."""

    names: tuple[str, ...] = ()
    texts, passes, max_length, batch_tokens = False, 4, 100, 100
    vocab_size: int | None = None
    batch_s: float | None = None
    patience_s: float | None = None
    identity = pb.ScorerIdentity(name="gated")

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.begun = 0
        self.broken = False

    def score(self, pairs: Sequence[EncodedPair]) -> Sequence[Result]:
        """Ones."""
        self.begun += 1
        self.gate.acquire()
        return [np.ones(1, np.float32)] * len(pairs)

    def check(self) -> None:
        """Raises if it is broken."""
        if self.broken:
            raise RuntimeError("it is broken")


def test_several_scorers_take_and_check_what_each_of_them_does() -> None:
    section = {"kind": "several", "scorers": {"taste": function("count"), "rules": function("count")}}
    config: Any = TypeAdapter[Any](ScorerConfig).validate_python(section)
    taste, rules = Gated(), Gated()
    taste.vocab_size, taste.max_length, taste.batch_tokens, taste.passes = 30, 50, 200, 1
    rules.vocab_size, rules.max_length, rules.batch_tokens, rules.passes = 20, 80, 100, 3
    rules.patience_s, rules.texts = 40.0, True
    several = SeveralScorers(config, {"taste": taste, "rules": rules}, 10.0)
    assert (several.vocab_size, several.max_length, several.batch_tokens) == (20, 50, 100)
    assert (several.passes, several.patience_s, several.texts) == (3, 40.0, True)
    assert SeveralScorers(config, {"taste": taste}, 10.0).patience_s == 10.0
    several.check()
    rules.broken = True
    with pytest.raises(RuntimeError, match="it is broken"):
        several.check()


def test_a_model_among_several_has_its_deadline_for_what_it_computes_and_not_for_its_turn() -> None:
    loop, gated = VirtualLoop(), Gated()
    section = {"kind": "several", "scorers": {"taste": function("count")}}
    several = SeveralScorers(TypeAdapter[Any](ScorerConfig).validate_python(section), {"taste": gated}, 10.0)

    async def test() -> None:
        batches = [asyncio.create_task(several.score(PAIRS[:1])) for _ in range(3)]
        for number, batch in enumerate(batches[:2], 1):
            await until(lambda number=number: gated.begun == number)  # type: ignore[misc]
            loop.now += 9
            await settled()
            gated.gate.release()
            assert await batch == [[1.0]]
        await until(lambda: gated.begun == 3)
        await settled()
        loop.now += 11
        with pytest.raises(HungError, match="taste has run for longer than batch_s, 10 s"):
            await batches[2]
        gated.gate.release()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test())


def test_the_file_that_holds_an_errors_text_is_named(tmp_path: Path) -> None:
    """Serve's own set-up: a rotating file behind a buffer."""
    file = logging.handlers.RotatingFileHandler(tmp_path / "replica_reward_Reward_7.log")
    buffer = logging.handlers.MemoryHandler(1, target=file)
    log = logging.getLogger("ray.serve")
    log.addHandler(buffer)
    try:
        with pytest.raises(SpoiltError, match=r"for its text: replica_reward_Reward_7\.log in `serve` of"):
            scored(make(**function("broken")), PAIRS[:1])
    finally:
        log.removeHandler(buffer)
        file.close()
    text = (tmp_path / "replica_reward_Reward_7.log").read_text()
    assert "tests.scorers:broken failed" in text
    assert "KeyError" in text
