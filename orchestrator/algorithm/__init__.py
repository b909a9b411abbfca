"""PPO's arithmetic as pure functions: KL, rewards, advantages, loss. No I/O, no state.

May import quartet. loop and policy import it.
"""
