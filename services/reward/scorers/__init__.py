"""Scorers of pairs: a model, a function in worker processes, or several by name.

May import client, config, http_fields, kinds and quartet. encoding and replica import it.
"""
