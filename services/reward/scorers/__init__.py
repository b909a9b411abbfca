"""Scorers of pairs: a model, a Python function, or a blend.

May import config and quartet. encoding and replica import it.
"""
