"""The run that a replica works for: its lease, and the timeline of what the replica holds.

May import folders and wire. services import it.
"""
