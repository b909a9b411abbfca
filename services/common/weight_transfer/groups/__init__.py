"""Process groups between the learner and the rollout workers, over gloo or NCCL.

May import nothing. receiver and sender import it.
"""
