"""How a set of weights travels from the learner to the rollout engines."""
