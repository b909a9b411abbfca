"""Environments, which answer between the responses of a policy, and agents, which have conversations with it: their
contracts, and the settings of a run with one.

May import quartet. commands, config, deployment, experience and loop import it.
"""
