"""Makes keys: an authority, certificates, bearer tokens and a policy. Needs the cryptography library.

May import authentication, config, folders, identity and policy. orchestrator imports it.
"""
