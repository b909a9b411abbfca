"""Sums of two numbers below 100: a policy that is often wrong, and a rule that tells when."""
