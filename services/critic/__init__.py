"""Critic: values of response tokens, and the training of the model that gives them.

May import quartet. orchestrator imports it: client and config.
"""
