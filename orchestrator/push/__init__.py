"""New weights to every rollout replica as one transaction, and to the replicas that join later.

May import config, quartet, services and tracing. commands and loop import it.
"""
