"""The commands `quartet train`, `check`, `evaluate` and others: each connects the packages and holds no other logic.

May import every package here but report. cli imports it.
"""
