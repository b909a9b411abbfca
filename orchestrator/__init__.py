"""The orchestrator of a run: the loop, its packages, and the `quartet` command.

Of services it imports clients and configs, never a replica or an engine.

May import quartet and services. recipes imports it.
"""
