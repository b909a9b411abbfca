"""Groups of training ranks, in threads or as Ray actors: one call to all, with a deadline.

May import models, config and wire. weight_transfer, learner, critic and the policy import it.
"""
