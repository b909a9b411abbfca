"""The methods that each role may call."""

from collections.abc import Mapping

from quartet.security.identity import Role

HEALTH = "/grpc.health.v1.Health/"
_SCORING_METHODS = frozenset(
    {
        "/quartet.v1.Reward/Score",
        "/quartet.v1.Reward/Info",
        "/quartet.v1.Reference/Logprobs",
        "/quartet.v1.Reference/Info",
    }
)
_INFO_METHODS = frozenset({f"/quartet.v1.{name}/Info" for name in ("Rollout", "Reward", "Reference", "Critic")})
_METHODS: Mapping[Role, frozenset[str] | None] = {
    "trainer": None,  # all methods, including those that later versions add
    "judge-client": _SCORING_METHODS,
    "prober": _INFO_METHODS | {"/ray.serve.RayServeAPIService/Healthz"},
}


def may_call(role: Role, method: str) -> bool:
    """True if `role` may call `method`, given as `/package.Service/Method`. Every role may ask for health."""
    methods = _METHODS[role]
    return methods is None or method in methods or method.startswith(HEALTH)
