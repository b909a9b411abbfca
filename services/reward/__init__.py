"""Reward: scores pairs of prompt and response, also without a training run.

Others may import client and config.
"""
