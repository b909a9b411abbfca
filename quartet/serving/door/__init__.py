"""The guards at the gRPC and HTTP ports of Serve's proxy: they check every call before Serve sees it.

May import config, in_turn, seams, security and wire. proxy and replica_process import it.
"""
