"""Identities of callers, the policy that says what each may do, and the keys that prove identities.

It needs neither Ray nor torch. May import config, folders and wire.
orchestrator, services, serving and weight_transfer import it.
"""
