"""Makes keys: an authority, certificates, bearer tokens and a policy. Needs the cryptography library."""
