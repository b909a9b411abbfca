"""Host memory of a push: buckets, filled in turn, pinned for GPUs or shared with other processes.

May import manifest. sender, receiver, ipc and the rollout service import it.
"""
