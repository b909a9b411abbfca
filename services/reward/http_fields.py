"""Bodies of requests and answers over HTTP: Quartet's own, and those of other servers' protocols, as far as a score
has a place in them. All fields that are not named here are refused, since a request that asked for more would not get
it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quartet.wire.outcomes import Outcome
from quartet.wire.pairs import LEAST_S

MOST_ROWS = 4096
"""Most pairs of one request."""
Token = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Text = Annotated[str, Field(max_length=2 << 20)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST_ROWS)]
Name = Annotated[str, Field(max_length=256)]
OutcomeName = Literal["scored", "not_applicable", "timeout", "failed", "refused", "not_finite"]
OUTCOMES: Mapping[Outcome, OutcomeName] = dict(zip(Outcome, get_args(OutcomeName), strict=True))
"""Outcome -> its name in answers."""


class Body(BaseModel):
    """A body in which unknown fields, and values of other types than the stated ones, are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a chat, with text alone."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | list[TextPart] = ""

    @property
    def text(self) -> str:
        """The message's text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_ROWS)]


class GivenPair(Body):
    """A prompt and a response, both as text or both as token ids of the scorer's tokenizer."""

    prompt: Text | Messages | None = None
    """Text, or messages that the tokenizer's chat template renders, up to where the response begins."""
    response: Text | None = None
    """Text; an end-of-sequence token is added for model scorers, unless `ended` is false."""
    prompt_ids: list[Token] | None = None
    response_ids: list[Token] | None = None
    label: Text = ""
    """The right answer, or whatever else the scorer's functions compare with."""
    columns: dict[str, Any] = {}
    """All else that is known of the pair, such as other columns of the data set, for function scorers."""
    group: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    """The same number for all responses to one prompt, for scorers that compare them. Another request's are of other
    prompts, unless both have the same `groups_of`."""
    ended: bool | None = None
    """False: the response was cut off before its end. Left out: a text was not, and ids were not if they end in the
    tokenizer's end-of-sequence token."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        texts, ids = (self.prompt, self.response), (self.prompt_ids, self.response_ids)
        if not any(all(each is not None for each in form) for form in (texts, ids)):
            raise ValueError("should have prompt and response, or prompt_ids and response_ids")
        if any(each is not None for each in texts) and any(each is not None for each in ids):
            raise ValueError("has texts and ids; should have one of both")
        return self


class RewardsRequest(Body):
    """Pairs to score."""

    scorer: Name = ""
    """Name of the scorer, as `/v1/models` lists it; may be left out where there is one."""
    pairs: Annotated[list[GivenPair], Field(min_length=1, max_length=MOST_ROWS)]
    pair_timeout_s: Annotated[float, Field(ge=LEAST_S, le=86_400)] | None = None
    """The longest time in seconds that the scorer should spend on a pair; left out: what the scorer allows."""
    groups_of: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Text of the caller's choice, such as a random one: in all of its requests with it, pairs of one `group`
    are responses to one prompt. Left out: a request's groups are its own."""

    @model_validator(mode="after")
    def _all_of_one_form(self) -> Self:
        if len({pair.prompt_ids is None for pair in self.pairs}) > 1:
            raise ValueError("pairs: some have texts and some ids; send two requests")
        if len({pair.group is None for pair in self.pairs}) > 1:
            raise ValueError("pairs: some have a group and some none; give each one, or none")
        return self


class Result(BaseModel):
    """The result of a pair."""

    outcome: OutcomeName
    scores: dict[str, float] | None
    """Name -> score, by one name, `score`, where the scorer names none; null unless the outcome is `scored`."""
    reason: str | None
    """The reason why the pair is not scored; null if it is."""


class ScorerFacts(BaseModel):
    """The scorer that gave the scores."""

    name: str
    model_hash: str
    """sha256 of the model's files or the function's source; scores with equal hashes can be compared."""


class RewardsAnswer(BaseModel):
    """The results of all pairs, in their order."""

    scorer: ScorerFacts
    results: list[Result]


class GetRewardRequest(Body):
    """OpenRLHF's request to a remote reward model."""

    query: Texts
    """Prompts with their responses, special tokens included."""
    prompts: list[Text] | None = None
    """Prompts: the rest of a query that begins with its prompt is the response, of others all is."""
    labels: list[Text | int | float | bool | None] | None = None
    scorer: Name = ""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        for name, given in (("prompts", self.prompts), ("labels", self.labels)):
            if given and len(given) != len(self.query):
                raise ValueError(f"{name}: {len(given)} for {len(self.query)} queries; send one each, or none")
        return self


class GetRewardAnswer(BaseModel):
    """OpenRLHF's answer."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]
    """Name -> all scores of that name."""


class _Pooling(Body):
    """Fields of vLLM's requests that change nothing here, with the values that they may have."""

    model: Name = ""
    """Name of the scorer; with `/NAME` behind it, of one of several scores that it gives."""
    user: Name | None = None
    use_activation: Literal[False] | None = None
    """Scores are as the scorer gives them."""
    activation: Literal[False] | None = None
    """The same in earlier versions."""


class _PoolingInput(_Pooling):
    input: Text | list[Token] | list[Text] | list[list[Token]] | None = None
    """Whole texts or token ids; a model scores them at their last token."""
    messages: Messages | None = None
    """A chat that ends with the response."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("input: should be given, or messages in its place")
        if self.input is not None and not len(self.input):
            raise ValueError("input: empty; send a text or token ids")
        if isinstance(self.input, list) and len(self.input) > MOST_ROWS and not isinstance(self.input[0], int):
            raise ValueError(f"input: {len(self.input)} rows; at most {MOST_ROWS}, send several requests")
        return self


class ClassifyRequest(_PoolingInput):
    """vLLM's request to /classify."""


class PoolingRequest(_PoolingInput):
    """vLLM's request to /pooling."""

    task: Literal["classify"] | None = None
    encoding_format: Literal["float"] = "float"


class ScoreRequest(_Pooling):
    """vLLM's request to /score: a prompt for each response, or one for all of them. The two sides have one of four
    pairs of names."""

    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None
    queries: Text | Texts | None = None
    documents: Text | Texts | None = None
    items: Text | Texts | None = None
    data_1: Text | Texts | None = None
    data_2: Text | Texts | None = None

    @model_validator(mode="after")
    def _two_sides(self) -> Self:
        prompts, responses = self.sides
        if len(prompts) not in (1, len(responses)):
            raise ValueError(
                f"{self.names[0]}: {len(prompts)} prompts for {len(responses)} responses; send one for each, or one "
                "for all"
            )
        return self

    @property
    def names(self) -> tuple[str, str]:
        """Names of the fields of the prompts and of the responses. ValueError unless exactly one pair is given."""
        names = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
        given = {name for pair in names for name in pair if getattr(self, name) is not None}
        found = [pair for pair in names if given == {*pair}]
        if not found:
            raise ValueError("should have text_1 and text_2, or queries and documents")
        return found[0]

    @property
    def sides(self) -> tuple[Sequence[str], Sequence[str]]:
        """Prompts, and responses."""
        given = [getattr(self, name) for name in self.names]
        prompts, responses = ([each] if isinstance(each, str) else each for each in given)
        return prompts, responses


class Usage(BaseModel):
    """Tokens, which are not counted."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0


class VllmAnswer(BaseModel):
    """Fields that vLLM's answers have in common."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Unix time in seconds."""
    model: str
    usage: Usage = Usage()


class ClassifyData(BaseModel):
    """The scores of an input."""

    index: int
    label: str
    """Name of the highest score."""
    probs: list[float]
    """All scores, as the scorer gives them: no probabilities."""
    num_classes: int


class ClassifyAnswer(VllmAnswer):
    """vLLM's answer of /classify."""

    data: list[ClassifyData]


class PoolingData(BaseModel):
    """The scores of an input."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float]


class PoolingAnswer(VllmAnswer):
    """vLLM's answer of /pooling."""

    data: list[PoolingData]


class ScoreData(BaseModel):
    """The score of a pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(VllmAnswer):
    """vLLM's answer of /score."""

    data: list[ScoreData]


class TokenizeRequest(Body):
    """vLLM's request to /tokenize."""

    model: Name = ""
    prompt: Text
    add_special_tokens: bool = True


class TokenizeAnswer(BaseModel):
    """vLLM's answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class _Tei(Body):
    """Fields of Text Embeddings Inference that change nothing here, with the values that they may have."""

    truncate: Literal[False] | None = None
    """Texts that are too long are errors."""
    truncation_direction: str | None = None
    raw_scores: Literal[True] | None = None
    """Scores are as the scorer gives them."""


class PredictRequest(_Tei):
    """Text Embeddings Inference's request to /predict."""

    inputs: Text | list[Text] | list[list[Text]]
    """A whole text, a pair [prompt, response], or a list of [text] and [prompt, response]."""
    parameters: dict[Literal["function_to_apply", "top_k"], Any] = {}
    """Parameters of Hugging Face's InferenceClient: `top_k`, and `function_to_apply`, which may be none."""

    @model_validator(mode="after")
    def _texts_and_pairs(self) -> Self:
        single = isinstance(self.inputs, str) or isinstance((*self.inputs, "")[0], str)
        rows = [self.inputs] if single else self.inputs
        if not rows or not all(isinstance(row, str) or len(row) in (1, 2) for row in rows):
            raise ValueError("inputs: should be a text, [prompt, response], or a list of [text], [prompt, response]")
        if len(rows) > MOST_ROWS:
            raise ValueError(f"inputs: {len(rows)} rows; at most {MOST_ROWS}, send several requests")
        if self.parameters.get("function_to_apply") not in (None, "none"):
            raise ValueError('parameters.function_to_apply: must be "none", as scores are as the scorer gives them')
        top = self.parameters.get("top_k")
        if top is not None and (type(top) is not int or top < 1):
            raise ValueError("parameters.top_k: should be a whole number from 1 on")
        return self


class Prediction(BaseModel):
    """A score and its name."""

    score: float
    label: str


PredictAnswer = list[Prediction] | list[list[Prediction]]
"""Text Embeddings Inference's answer of /predict, highest score first; for several inputs, a list for each."""


class RerankRequest(_Tei, _Pooling):
    """A request to /rerank: responses to a prompt, to be ordered by their score. Text Embeddings Inference calls them
    `texts`, vLLM and Jina `documents`, and each reads an answer of its own."""

    query: Text
    texts: Texts | None = None
    return_text: bool = False
    """Repeat the texts in the answer, as Text Embeddings Inference does."""
    documents: Texts | None = None
    top_n: Annotated[int, Field(ge=0)] = 0
    """Most places in the answer to `documents`; 0: all."""
    return_documents: Literal[True] | None = None

    @property
    def responses(self) -> Sequence[str]:
        """The responses."""
        return self.texts or self.documents or ()

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.texts is None) == (self.documents is None):
            raise ValueError("texts: should be given, or documents in its place")
        return self


class Rank(BaseModel):
    """The place of a response."""

    index: int
    score: float
    text: str | None = None


class Document(BaseModel):
    """A response as vLLM repeats it."""

    text: str


class Place(BaseModel):
    """The place of a response in vLLM's answer."""

    index: int
    document: Document
    relevance_score: float
    """The score, as the scorer gives it."""


class RerankAnswer(BaseModel):
    """vLLM's answer of /rerank, best first."""

    id: str
    model: str
    usage: Usage = Usage()
    results: list[Place]


class VerifyRequest(BaseModel):
    """NeMo Gym's request to a resources server. Further fields are for the scorer."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    responses_create_params: dict[str, Any]
    """The prompt is its `input`, a text or messages."""
    response: dict[str, Any]
    """The response is at the end of its `output`."""


class VerifyAnswer(VerifyRequest):
    """The request with its reward. A response that is not scored has null for its reward, `mask_sample` and
    `_ng_failure_class`."""

    reward: float | None
    reward_components: dict[str, float] | None
    mask_sample: bool = False
    failure_reason: str | None = None


class AggregateRequest(Body):
    """NeMo Gym's request to /aggregate_metrics."""

    verify_responses: Annotated[list["VerifyFacts"], Field(max_length=MOST_ROWS)]
    """Answers of /verify, of which only the numbers are read."""


class VerifyFacts(BaseModel):
    """Fields of an answer of /verify that decide where its numbers count; all others may stand beside them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    task: Annotated[int, Field(alias="_ng_task_index", ge=-(1 << 63), lt=1 << 63)] = 0
    mask_sample: bool = False


class AggregateAnswer(BaseModel):
    """NeMo Gym's answer of /aggregate_metrics; figures are called such as `mean/reward`."""

    group_level_metrics: list[dict[str, float]]
    """The figures of each task, with its number."""
    agent_metrics: dict[str, float]
    key_metrics: dict[str, float]
    """The means among them."""


class ModelCard(BaseModel):
    """A scorer."""

    id: str
    object: Literal["model"] = "model"
    owned_by: Literal["quartet"] = "quartet"
    scorer: str
    """Kind and folder, or function."""
    model_hash: str
    scores: list[str]
    """Names of the scores that it gives."""
    max_model_len: int


class ModelList(BaseModel):
    """All scorers."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorFacts(BaseModel):
    """An error."""

    message: str
    type: str
    param: str | None
    """The field in question."""
    code: int
    """The status."""


class ErrorAnswer(BaseModel):
    """An answer that is an error."""

    error: ErrorFacts
