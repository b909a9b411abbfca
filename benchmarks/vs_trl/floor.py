"""The arithmetic of a step, and how fast this machine's cores are at arithmetic alone."""

import time

import torch

from benchmarks.vs_trl.cases import Case

SIZE = 1536
"""Size of the matrices whose product measures arithmetic alone."""


def operations(case: Case, response: float) -> dict[str, float]:
    """Floating-point operations of each stage for responses of so many tokens in the mean.

    Two for each weight and token in a forward pass and six in a training step (Kaplan et al. 2020, arXiv:2001.08361),
    without attention's products of tokens with tokens. Scoring is a forward pass of the reward model, and with PPO of
    reference and critic; with PPO the critic learns too.
    """
    body = case.layers * (4 + 9) * case.hidden**2
    every, answered = case.batch * (case.prompt + response), case.batch * response
    head = case.vocabulary * case.hidden
    forward = 2 * (body * every + head * answered)
    ppo = case.algorithm == "ppo"
    return {
        "generate": forward,
        "score": 2 * body * every + ppo * (2 * body * every + forward),
        "logprobs": forward,
        "train": case.epochs * (3 * forward + ppo * 6 * body * every),
    }


def rate(threads: int, dtype: str) -> float:
    """Floating-point operations per second of the cores in one large product of matrices of this dtype."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    left, right = (torch.randn(SIZE, SIZE).to(getattr(torch, dtype)) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(before)
    return 2 * SIZE**3 / best
