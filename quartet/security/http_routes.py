"""The paths over HTTP, a row each: its method, who may call it, and whether its requests hold texts."""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, get_args

from quartet.security.identity import HOLDER, Role

_EVERYBODY = frozenset({*get_args(Role), HOLDER})
_SAMPLER = frozenset({"sampler"})
_AGENT = frozenset({"sampler", HOLDER})
"""Callers of requests that may belong to a session."""
_JUDGE = frozenset({"judge-client"})
_PROBER = frozenset({"prober"})


class HttpRoute(NamedTuple):
    """A path of an application."""

    method: str
    roles: frozenset[str]
    """Roles that may call it; a trainer may call all."""
    texts: bool = False
    """True if its requests hold texts or tokens, for which a body may be larger."""


ROUTES: Mapping[str, Mapping[str, HttpRoute]] = {
    "Rollout": {
        "/health": HttpRoute("GET", _EVERYBODY),
        "/metrics": HttpRoute("GET", _SAMPLER | _PROBER),
        "/v1/models": HttpRoute("GET", _AGENT),
        "/v1/completions": HttpRoute("POST", _AGENT, texts=True),
        "/v1/chat/completions": HttpRoute("POST", _AGENT, texts=True),
        "/v1/messages": HttpRoute("POST", _AGENT, texts=True),
        "/v1/messages/count_tokens": HttpRoute("POST", _AGENT, texts=True),
        "/inference/v1/generate": HttpRoute("POST", _AGENT, texts=True),
        "/tokenize": HttpRoute("POST", _AGENT, texts=True),
        "/detokenize": HttpRoute("POST", _AGENT, texts=True),
        "/tokenizer_info": HttpRoute("GET", _AGENT),
        "/rl/start_session": HttpRoute("POST", _SAMPLER),
        "/rl/set_reward": HttpRoute("POST", _AGENT),
        "/rl/end_session": HttpRoute("POST", _AGENT),
        "/rl/trajectory": HttpRoute("POST", _SAMPLER),
    },
    "Reward": {
        "/health": HttpRoute("GET", _EVERYBODY),
        "/metrics": HttpRoute("GET", _JUDGE | _PROBER),
        "/openapi.json": HttpRoute("GET", _JUDGE),
        "/v1/models": HttpRoute("GET", _JUDGE),
        "/v1/rewards": HttpRoute("POST", _JUDGE, texts=True),
        "/get_reward": HttpRoute("POST", _JUDGE, texts=True),
        "/score": HttpRoute("POST", _JUDGE, texts=True),
        "/v1/score": HttpRoute("POST", _JUDGE, texts=True),
        "/classify": HttpRoute("POST", _JUDGE, texts=True),
        "/pooling": HttpRoute("POST", _JUDGE, texts=True),
        "/tokenize": HttpRoute("POST", _JUDGE, texts=True),
        "/predict": HttpRoute("POST", _JUDGE, texts=True),
        "/rerank": HttpRoute("POST", _JUDGE, texts=True),
        "/v1/rerank": HttpRoute("POST", _JUDGE, texts=True),
        "/v2/rerank": HttpRoute("POST", _JUDGE, texts=True),
        "/verify": HttpRoute("POST", _JUDGE, texts=True),
        "/aggregate_metrics": HttpRoute("POST", _JUDGE, texts=True),
        "/reverify_mode": HttpRoute("GET", _JUDGE),
        "/seed_session": HttpRoute("POST", _JUDGE),
    },
}
"""Deployment -> path below the route prefix of its applications -> route; no others exist."""


def http_route(deployment: str, path: str) -> str:
    """The name of a route where gRPC has the name of a method, as `/http/Rollout/v1/models`.

    Args:
        deployment: that answers; empty for a path of no application.
        path: below the application's route prefix.
    """
    return f"/http/{deployment}{path}"


_SCORER = re.compile(r"(?s)/scorers/([^/]{1,256})(/.*)")
_SCORE = re.compile(r"(?s)/([^/]{1,256})(/.*)")


def scorer_in(path: str) -> tuple[str, str]:
    """The scorer that a path such as `/scorers/NAME/score` names, as NAME or NAME/SCORE, and the path behind it; an
    empty name and the path itself if it names none. For clients of a reward application that can name a scorer only
    by an address; the replica says whether there is one of that name."""
    if (named := _SCORER.fullmatch(path)) is None:
        return "", path
    scorer, below = named.groups()
    if below not in ROUTES["Reward"] and (scored := _SCORE.fullmatch(below)):
        return f"{scorer}/{scored[1]}", scored[2]
    return scorer, below


@cache
def routes_for(role: str) -> frozenset[str]:
    """Names of the routes that a role other than trainer may call."""
    return frozenset(
        http_route(deployment, path)
        for deployment, routes in ROUTES.items()
        for path, route in routes.items()
        if role in route.roles
    )


STARTS_SESSION = http_route("Rollout", "/rl/start_session")
"""Name of the route that starts a session."""
