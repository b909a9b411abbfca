"""The models that a run trains, each behind the same few methods: the policy, and the critic if there is one.

May import policy, clients and config. loop and commands import it.
"""
