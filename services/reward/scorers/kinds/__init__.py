"""Kinds of scorers with a rule of their own: in each module `make` gets the fields of its class in
services/reward/kinds.py and returns the function, all in a worker process.

May import client, http_fields and quartet. Nothing imports it; services/reward/kinds.py names it.
"""
