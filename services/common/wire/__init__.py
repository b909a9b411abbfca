"""The network protocol: arrays as bytes, errors as statuses, the client base, identities of models.

Imports no Ray, vLLM or torch, and no other package of this folder. Each of them may import it.
"""
