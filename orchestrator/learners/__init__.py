"""The models that a run trains, each behind the same few methods: the policy, and the critic if there is one.

May import config, policy, quartet and services. commands and loop import it.
"""
