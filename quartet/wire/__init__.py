"""The network protocol: arrays as bytes, errors as statuses, the client base, identities of models.

It needs neither Ray, vLLM nor torch. May import nothing. All but objectives, seams, tasks and threads import it.
"""
