"""The guard at the gRPC port of Serve's proxy: it checks every call before Serve sees it.

May import seams, security and wire. proxy and replica_process import it.
"""
