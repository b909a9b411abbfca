"""Critic: values of response tokens, and the training of the model that gives them.

Others may import client and config.
"""
