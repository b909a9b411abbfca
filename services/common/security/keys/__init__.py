"""Makes keys: an authority, certificates, bearer tokens and a policy. Needs the cryptography library.

May import authentication, config, identity and policy. local and orchestrator import it.
"""
