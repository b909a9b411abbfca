"""Process groups between the learner and the rollout workers, over gloo or NCCL.

May import nothing of weight_transfer. sender, receiver and the benchmarks import it.
"""
