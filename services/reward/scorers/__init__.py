"""Scorers of pairs: a model, a Python function, or a blend. Only the reward service imports it."""
