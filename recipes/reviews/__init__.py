"""Short product reviews: a policy, a learned reward model, and a gold scorer that neither is trained on.

May import common and quartet. Nothing imports it.
"""
