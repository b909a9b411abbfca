"""The transfer of a set of weights from the learner to the rollout engines.

May import models, ranks, security and wire. orchestrator and services import it.
"""
