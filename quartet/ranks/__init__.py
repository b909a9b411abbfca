"""Groups of training ranks, as Ray actors or one in a thread: one call to all, with a deadline.

May import config, models, seams, threads and wire. learner, orchestrator, services and weight_transfer import it.
"""
