"""`quartet init`: a commented YAML file for a user's own policy, reward and prompts.

May import algorithms, checks, config, data, deployment and quartet. cli imports it.
"""
