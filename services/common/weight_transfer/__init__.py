"""The transfer of a set of weights from the learner to the rollout engines.

May import ranks, config and wire. The policy, push and the rollout service import it.
"""
