"""Code that runs inside vLLM or drives it; only the rollout service imports it."""
