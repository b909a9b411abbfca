"""Environments, which answer between the responses of a policy: their contract, and the settings of a run with one.

May import quartet. commands, config, deployment, experience and loop import it.
"""
