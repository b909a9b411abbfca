"""Reward: scores pairs of prompt and response, also without a training run.

May import common. orchestrator imports it: client and config.
"""
