"""Process groups between the learner and the rollout workers, over gloo or NCCL.

May import ranks and seams. receiver and sender import it.
"""
