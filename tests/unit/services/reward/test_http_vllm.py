"""The HTTP door of the reward service by vLLM's own classes of requests and answers."""

from pathlib import Path
from typing import Any

import pytest

from tests.http_requests import ask
from tests.unit.reward_door import reward_door, scorers_of_all_kinds


@pytest.mark.exhaustive  # importing vLLM takes ten seconds
async def test_vllms_requests_are_taken_and_its_answers_are_given(policy_folder: Path, reward_folder: Path) -> None:
    from vllm.entrypoints.pooling.classify.protocol import ClassificationCompletionRequest, ClassificationResponse
    from vllm.entrypoints.pooling.pooling.protocol import PoolingCompletionRequest, PoolingResponse
    from vllm.entrypoints.pooling.scoring.protocol import (
        RerankRequest,
        RerankResponse,
        ScoreDataRequest,
        ScoreQueriesDocumentsRequest,
        ScoreQueriesItemsRequest,
        ScoreResponse,
        ScoreTextRequest,
    )
    from vllm.entrypoints.serve.engine.protocol import ModelList
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest, TokenizeResponse

    model: Any = {"model": "taste"}
    sides: list[Any] = [
        ScoreTextRequest(text_1="w5", text_2=["w6", "w7"], **model),
        ScoreQueriesDocumentsRequest(queries=["w5", "w6"], documents=["w6", "w7"], **model),
        ScoreQueriesItemsRequest(queries="w5", items="w6", **model),
        ScoreDataRequest(data_1="w5", data_2=["w6"], use_activation=False, **model),
    ]
    cases = [("/score", request, ScoreResponse) for request in sides] + [
        ("/v1/rerank", RerankRequest(query="w5", documents=["w6", "w7"], top_n=1, **model), RerankResponse),
        ("/classify", ClassificationCompletionRequest(input=["w5 w6"], **model), ClassificationResponse),
        ("/classify", ClassificationCompletionRequest(input=[[5, 6]], user="me", **model), ClassificationResponse),
        ("/pooling", PoolingCompletionRequest(input="w5 w6", task="classify", **model), PoolingResponse),
        ("/tokenize", TokenizeCompletionRequest(prompt="w5", **model), TokenizeResponse),
    ]
    async with reward_door(scorers_of_all_kinds(str(reward_folder), str(policy_folder))) as port:
        for path, request, answer in cases:
            got = await ask(port, f"/reward{path}", request.model_dump(exclude_unset=True))
            assert got.status == 200, got.body
            # Fields that vLLM's clients do not know would be told by a warning of theirs.
            assert set(got.json) <= {*answer.model_fields, "max_model_len"}
            answer.model_validate(got.json)
        ModelList.model_validate((await ask(port, "/reward/v1/models")).json)
