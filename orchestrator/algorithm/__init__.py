"""PPO's arithmetic as pure functions: KL, rewards, advantages, loss. No I/O, no state.

May import services.common.models.numerics. policy and loop import it.
"""
