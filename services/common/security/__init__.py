"""Identities of callers, the policy that says what each may do, and the keys that prove identities.

May import config and wire; no Ray or torch. serving, clients and the orchestrator import it.
"""
