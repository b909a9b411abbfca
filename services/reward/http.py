"""The HTTP door of the reward service: Quartet's own JSON, and the protocols of other reward servers, over the same
scorers as gRPC.

Each path only translates a body into a request of protos/reward.proto and its reply into a body. Which calls are
admitted, in whose share they wait and what becomes of a pair is decided behind both doors.
"""

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from protos import reward_pb2 as pb
from quartet.security.http_routes import scorer_in
from quartet.serving.http import health, refusal, refused, share_of_request
from quartet.wire.codec import unpack_floats
from quartet.wire.errors import InvalidArgument, NotFound, ServiceError
from quartet.wire.http_errors import HttpError, http_error
from quartet.wire.json_object import json_object
from quartet.wire.outcomes import MAY_PASS, Outcome, Unscored
from quartet.wire.pairs import SCORE
from services.reward import http_fields as fields
from services.reward import http_requests as requests
from services.reward.aggregates import aggregated

if TYPE_CHECKING:
    from services.reward.doors import Doors

_FIELD = re.compile(r"[A-Za-z_][\w.\[\]]*(?=: )")
_ALTERNATIVE = re.compile(r"(?:constrained-)?(?:str|int|float|bool)$|[a-z]+\[")
"""Names that pydantic gives to the alternatives of a field."""
_SCORER = "quartet.scorer"
_ERRORS = (400, 401, 403, 404, 409, 413, 415, 429, 500, 503)
"""Statuses of answers that are errors."""
_OF_FAILURES = ("failure_kind", "failure_reason", "_ng_failure_class")
"""Fields of NeMo Gym's answer for a response without a score."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A scorer that a request names, and one of its scores if the request names one."""

    by: str
    """The field that names it, for errors."""
    scorer: str
    score: str = ""
    one: bool = False
    """True if the answer has room for one score."""

    def check(self, names: Sequence[str]) -> None:
        """InvalidArgument unless scores of these names, all that the scorer gives, have what is chosen."""
        if self.score and self.score not in names:
            missing = f"there is no score {self.score[:64]!r}; the scorer gives {', '.join(names)}"
            raise InvalidArgument(f"{self.by}: {missing}")
        if self.one and not self.score and len(names) > 1:
            raise InvalidArgument(
                f"{self.by}: the scorer gives {', '.join(names)}; name one of them as SCORER/{names[0]}"
            )


class Table:
    """The results of a call's pairs."""

    def __init__(self, reply: pb.ScoreResponse, choice: Choice) -> None:
        """InvalidArgument if a scorer that has been replaced by now does not give what was chosen."""
        self.scorer, self.names = reply.scorer, tuple(reply.scorer.names) or (SCORE,)
        choice.check(self.names)
        numbers = unpack_floats(reply.scores, "scores").reshape(-1, len(self.names))
        if choice.score:
            at = self.names.index(choice.score)
            self.names, numbers = (choice.score,), numbers[:, at : at + 1]
        self.numbers: list[list[float]] = numbers.tolist()
        """[B, K]; NaN for pairs that are not scored."""
        outcomes = reply.outcomes or bytes(len(numbers))
        reasons = iter(reply.reasons)
        self.unscored = {row: Unscored(Outcome(each), next(reasons)) for row, each in enumerate(outcomes) if each}

    def named(self, row: int) -> dict[str, float]:
        """The scores of a pair that is scored."""
        return dict(zip(self.names, self.numbers[row], strict=True))

    def one(self, row: int) -> float:
        """The score of a pair that is scored, where one was chosen."""
        return self.numbers[row][0]

    def check_scored(self, field: str) -> None:
        """Raises UnscoredError if a pair is not scored: other servers' protocols have no place for that, and a number
        would be taken for a score."""
        if self.unscored:
            raise UnscoredError(field, self.unscored, len(self.numbers))


class UnscoredError(Exception):
    """A call some of whose pairs are not scored."""

    def __init__(self, field: str, unscored: dict[int, Unscored], rows: int) -> None:
        first, result = next(iter(unscored.items()))
        where = f"{field}[{first}]"
        some = f" ({len(unscored)} of {rows} are not scored)" if rows > 1 else ""
        # A client that knows no other answer asks again, which helps if an outcome may be another then.
        pause = 1 if all(each.outcome in MAY_PASS for each in unscored.values()) else None
        self.answer = HttpError(503, f"{where}: {result}{some}", where, pause)
        super().__init__(self.answer.message)


class _Request(Request):
    """A request whose body is read as those at other doors are."""

    async def json(self) -> Any:
        """The body's contents."""
        try:
            return json_object(await self.body())
        except InvalidArgument as error:
            raise HTTPException(400, str(error)) from None


class _Route(APIRoute):
    """Routes with such requests, whose errors are answers too."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """FastAPI's handler, given such a request."""
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            # Here, as Starlette raises errors that are not its own again once they are answered.
            try:
                return await handle(_Request(request.scope, request.receive))
            except RequestValidationError as error:
                return refusal(_invalid(error))
            except HTTPException as error:
                return refusal(HttpError(error.status_code, str(error.detail)))
            except UnscoredError as error:
                return refusal(error.answer)
            except ServiceError as error:
                named = _FIELD.match(str(error))
                return refusal(http_error(error, named[0] if named else None))
            except Exception as error:
                return refused(error, self.path)

        return answered


class Door:
    """Answers the requests of one replica, as an application of ASGI."""

    def __init__(self, scorers: "Doors") -> None:
        self._scorers = scorers
        self._app = app = FastAPI(
            title="Quartet's reward service",
            description="Scores prompts and responses, in JSON of its own and in the protocols of other servers.",
            version="1",
            docs_url=None,  # FastAPI's pages load scripts from elsewhere
            redoc_url=None,
            responses={status: {"model": fields.ErrorAnswer} for status in _ERRORS},
        )
        app.router.route_class = _Route
        self._add_routes(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer to one request."""
        root = scope.get("root_path", "")
        scorer, path = scorer_in(str(scope["path"]).removeprefix(root))
        await self._app({**scope, "path": f"{root}{path}", _SCORER: scorer}, receive, send)

    def _choice(self, request: Request, named: str, by: str, one: bool = False) -> Choice:
        """The scorer that the address or a field names: by its name, or by `name/score`.

        Args:
            request: the request.
            named: the field's contents.
            by: the field's name.
            one: True if the answer has room for one score.

        Raises:
            NotFound: there is not such a scorer.
            InvalidArgument: address and field name different ones, the scorer gives no such score, or it gives
                several and one has to be named.
        """
        by_address = request.scope[_SCORER]
        # One may say of which scorer, the other which of its scores.
        shorter, name = sorted((named, by_address), key=len)
        if shorter and not f"{name}/".startswith(f"{shorter}/"):
            raise InvalidArgument(
                f"{by}: {named[:64]!r}, but the address names {by_address[:64]!r}; name one of them"
            )
        known = self._scorers.listed()
        if not name:
            name = next(iter(known)) if len(known) == 1 else ""
        if not name:
            return Choice(by, "")  # said by the scorers, which are several
        whole, _, score = (name, "", "") if name in known else name.rpartition("/")
        if whole in known:
            choice = Choice(by, known[whole].name, score, one)
            choice.check(known[whole].scores or (SCORE,))
            return choice
        raise NotFound(f"{by}: {name[:64]!r} is no scorer here; there is {', '.join(sorted(known))}")

    async def _score(
        self,
        request: Request,
        named: str,
        made: pb.ScoreRequest,
        field: str,
        by: str = "model",
        one: bool = False,
    ) -> Table:
        """The results of a request's pairs.

        Args:
            request: the request.
            named: the scorer that its body names.
            made: the same request in the scorers' terms.
            field: the field of the body that holds them, for errors.
            by: the field that names the scorer.
            one: True if the answer has room for one score of a pair.
        """
        choice = self._choice(request, named, by, one)
        made.scorer = choice.scorer
        try:
            reply = await self._scorers.score(made, share_of_request(request), request.url.path.rpartition("/")[2])
        except ServiceError as error:
            raise requests.in_terms_of(error, field, by) from None
        return Table(reply, choice)

    def _add_routes(self, app: FastAPI) -> None:
        def post(path: str, answer: Any, summary: str) -> Callable[[Any], Any]:
            return app.post(path, response_model=answer, summary=summary)

        @app.get("/health", summary="Whether a scorer works")
        async def healthy(request: Request) -> Response:
            return health(await self._scorers.works(self._choice(request, "", "address").scorer))

        @app.get("/metrics", summary="Metrics in Prometheus' text format")
        async def metrics() -> Response:
            return Response(await self._scorers.metrics(), media_type="text/plain; version=1.0.0; charset=utf-8")

        @app.get("/v1/models", response_model=fields.ModelList, summary="The scorers")
        async def models() -> Response:
            listed = [_card(each) for each in (await self._scorers.infos()).scorers]
            return _json(fields.ModelList(data=listed))

        @post("/v1/rewards", fields.RewardsAnswer, "Scores of pairs, each with its outcome")
        async def rewards(asked: fields.RewardsRequest, request: Request) -> Response:
            table = await self._score(request, asked.scorer, requests.of_rewards(asked), "pairs", by="scorer")
            results = [_result(table, row) for row in range(len(asked.pairs))]
            scorer = fields.ScorerFacts(name=table.scorer.name, model_hash=table.scorer.model_hash)
            return _json(fields.RewardsAnswer(scorer=scorer, results=results))

        @post("/get_reward", fields.GetRewardAnswer, "OpenRLHF")
        async def get_reward(asked: fields.GetRewardRequest, request: Request) -> Response:
            made = requests.of_queries(asked.query, asked.prompts or (), asked.labels or ())
            table = await self._score(request, asked.scorer, made, "query", by="scorer", one=True)
            table.check_scored("query")
            scores = [table.one(row) for row in range(len(asked.query))]
            logs = {name: [row[at] for row in table.numbers] for at, name in enumerate(table.names)}
            return _json(fields.GetRewardAnswer(rewards=scores, scores=scores, extra_logs=logs))

        @post("/v1/score", fields.ScoreAnswer, "vLLM, as /score")
        @post("/score", fields.ScoreAnswer, "vLLM")
        async def score(asked: fields.ScoreRequest, request: Request) -> Response:
            prompts, responses = asked.sides
            prompts = [*prompts] * len(responses) if len(prompts) == 1 else prompts
            made, field = requests.of_texts(prompts, responses), asked.names[1]
            table = await self._score(request, asked.model, made, field, one=True)
            table.check_scored(field)
            data = [fields.ScoreData(index=row, score=table.one(row)) for row in range(len(responses))]
            return _json(fields.ScoreAnswer(data=data, **_of_vllm("score", asked.model, table)))

        @post("/classify", fields.ClassifyAnswer, "vLLM")
        async def classify(asked: fields.ClassifyRequest, request: Request) -> Response:
            table = await self._of_input(asked, request)
            data = [
                fields.ClassifyData(
                    index=row, label=max(zip(each, table.names, strict=True))[1], probs=each, num_classes=len(each)
                )
                for row, each in enumerate(table.numbers)
            ]
            return _json(fields.ClassifyAnswer(data=data, **_of_vllm("classify", asked.model, table)))

        @post("/pooling", fields.PoolingAnswer, "vLLM")
        async def pooling(asked: fields.PoolingRequest, request: Request) -> Response:
            table = await self._of_input(asked, request)
            data = [fields.PoolingData(index=row, data=each) for row, each in enumerate(table.numbers)]
            return _json(fields.PoolingAnswer(data=data, **_of_vllm("pool", asked.model, table)))

        @post("/tokenize", fields.TokenizeAnswer, "vLLM")
        async def tokenize(asked: fields.TokenizeRequest, request: Request) -> Response:
            scorer, share = self._choice(request, asked.model, "model").scorer, share_of_request(request)
            try:
                ids, most = await self._scorers.token_ids(scorer, asked.prompt, asked.add_special_tokens, share)
            except ServiceError as error:
                raise requests.in_terms_of(error, "prompt", "model") from None
            return _json(fields.TokenizeAnswer(count=len(ids), max_model_len=most, tokens=[*ids]))

        @post("/predict", fields.PredictAnswer, "Text Embeddings Inference")
        async def predict(asked: fields.PredictRequest, request: Request) -> Response:
            single, prompts, responses = requests.inputs(asked.inputs)
            made = requests.of_texts(prompts, responses)
            table = await self._score(request, "", made, "inputs", by="address")
            table.check_scored("inputs")
            top = asked.parameters.get("top_k")
            rows = [
                [{"score": score, "label": name} for score, name in sorted(zip(each, table.names, strict=True))[::-1]]
                for each in table.numbers
            ]
            cut = [row[:top] for row in rows]
            return JSONResponse(cut[0] if single else cut)

        @post("/v2/rerank", list[fields.Rank] | fields.RerankAnswer, "vLLM and Jina, as /rerank")
        @post("/v1/rerank", list[fields.Rank] | fields.RerankAnswer, "vLLM and Jina, as /rerank")
        @post("/rerank", list[fields.Rank] | fields.RerankAnswer, "Text Embeddings Inference, vLLM")
        async def rerank(asked: fields.RerankRequest, request: Request) -> Response:
            texts, field = asked.responses, "documents" if asked.texts is None else "texts"
            made = requests.of_texts([asked.query] * len(texts), texts)
            table = await self._score(request, asked.model, made, field, one=True)
            table.check_scored(field)
            ranks = sorted(((table.one(row), row) for row in range(len(texts))), key=lambda each: -each[0])
            if asked.texts is not None:
                return JSONResponse(
                    [
                        {"index": row, "score": score} | ({"text": texts[row]} if asked.return_text else {})
                        for score, row in ranks
                    ]
                )
            places = [
                fields.Place(index=row, document=fields.Document(text=texts[row]), relevance_score=score)
                for score, row in ranks[: asked.top_n or None]
            ]
            model = asked.model or table.scorer.name
            return _json(fields.RerankAnswer(id=f"rerank-{uuid.uuid4().hex}", model=model, results=places))

        @post("/verify", fields.VerifyAnswer, "NeMo Gym")
        async def verify(asked: fields.VerifyRequest, request: Request) -> Response:
            # An answer of before may be sent again, as to verify it anew.
            given = {name: value for name, value in asked.model_dump().items() if name not in _OF_FAILURES}
            made = requests.of_verify(given)
            table = await self._score(request, "", made, "response", by="address", one=True)
            return JSONResponse(given | _verified(table))

        @post("/aggregate_metrics", fields.AggregateAnswer, "NeMo Gym")
        async def aggregate_metrics(asked: fields.AggregateRequest) -> Response:
            answers = [each.model_dump(by_alias=True) for each in asked.verify_responses]
            return JSONResponse(aggregated(answers))

        @app.get("/reverify_mode", response_model=str, summary="NeMo Gym")
        async def reverify_mode() -> Response:
            return JSONResponse("stateless")

        @post("/seed_session", dict[str, Any], "NeMo Gym: nothing is kept between calls")
        async def seed_session() -> Response:
            return JSONResponse({})

    async def _of_input(self, asked: fields.ClassifyRequest | fields.PoolingRequest, request: Request) -> Table:
        """The scores of vLLM's `input` or `messages`."""
        field = "input" if asked.messages is None else "messages"
        made = requests.of_input(asked.input, asked.messages)
        table = await self._score(request, asked.model, made, field)
        table.check_scored(field)
        return table


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _card(info: pb.ScorerInfo) -> fields.ModelCard:
    return fields.ModelCard(
        id=info.name or info.identity.name,
        scorer=info.identity.name,
        model_hash=info.identity.model_hash,
        scores=[*info.identity.names] or [SCORE],
        max_model_len=info.model.max_length,
    )


def _of_vllm(kind: str, model: str, table: Table) -> dict[str, Any]:
    """Fields that vLLM's answers have in common."""
    return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model or table.scorer.name}


def _result(table: Table, row: int) -> fields.Result:
    unscored = table.unscored.get(row)
    if unscored is None:
        return fields.Result(outcome="scored", scores=table.named(row), reason=None)
    return fields.Result(outcome=fields.OUTCOMES[unscored.outcome], scores=None, reason=unscored.reason)


def _verified(table: Table) -> dict[str, Any]:
    """Fields that NeMo Gym's answer adds to its request."""
    unscored = table.unscored.get(0)
    if unscored is None:
        return {"reward": table.one(0), "reward_components": table.named(0), "mask_sample": False}
    outcome = fields.OUTCOMES[unscored.outcome]
    return {
        "reward": None,
        "reward_components": None,
        "mask_sample": True,
        "failure_kind": f"quartet:{outcome}",
        "failure_reason": unscored.reason,
        "_ng_failure_class": outcome,
    }


def _invalid(error: RequestValidationError) -> HttpError:
    """Names the first field that is wrong."""
    first = error.errors()[0]
    place = [each for each in first["loc"][1:] if isinstance(each, int) or not _ALTERNATIVE.match(each)]
    where = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).lstrip(".")[:128]
    message = str(first["msg"]).removeprefix("Value error, ")[:300]
    if first["type"] == "extra_forbidden":
        message = "not a field here"
    named = _FIELD.match(message)
    if not where and named:
        where, message = named[0], message[named.end() + 2 :]
    return HttpError(400, f"{where or 'the body'}: {message}", where or None)
