"""Reward: scores pairs of prompt and response, also without a training run.

May import quartet. orchestrator imports it: client, config and names.
"""
