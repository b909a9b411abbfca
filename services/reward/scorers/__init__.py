"""Scorers of pairs: a model, a Python function, or several by name.

May import config and quartet. encoding and replica import it.
"""
