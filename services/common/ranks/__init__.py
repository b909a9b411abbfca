"""Groups of training ranks, as a process or as Ray actors: one call to all, with a deadline.

May import config, models and wire. critic, learner, orchestrator, rollout and weight_transfer import it.
"""
