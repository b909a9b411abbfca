"""Proximal policy optimisation: advantages from a critic's values."""

from typing import Literal

from orchestrator.algorithms.contract import Algorithm, Baseline, Scale


class PPO(Algorithm):
    """PPO (Schulman et al. 2017, arXiv:1707.06347) with generalised advantages (arXiv:1506.02438)."""

    kind: Literal["ppo"] = "ppo"
    """Advantages from the values of a critic, which the run trains beside the policy."""
    baseline: Baseline = "critic"
    scale: Scale = "batch"
