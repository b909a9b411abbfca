"""The run that a replica works for: its lease, and the timeline of what the replica holds.

May import what serving may. critic and rollout import it.
"""
