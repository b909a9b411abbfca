"""Scorers of pairs: a model, a Python function, or a blend.

May import common and config. encoding and replica import it.
"""
