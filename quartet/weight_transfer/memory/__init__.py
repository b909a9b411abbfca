"""Memory of a push, on the host or a GPU: buckets, filled in turn, pinned or shared with other processes.

May import manifest. ipc, meeting, orchestrator, pieces, receiver and sender import it.
"""
