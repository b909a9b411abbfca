"""New weights to every rollout replica as one transaction, and to the replicas that join later.

May import config, policy and services.common. loop and commands import it.
"""
