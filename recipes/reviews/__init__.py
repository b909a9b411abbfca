"""Short product reviews: a policy, a learned reward model, and a gold scorer that neither is trained on.

May import common and services. Nothing imports it.
"""
