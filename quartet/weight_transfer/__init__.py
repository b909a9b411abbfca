"""The transfer of a set of weights from the learner to the rollout engines.

May import models, ranks, seams, security and wire. orchestrator and services import it.
"""
