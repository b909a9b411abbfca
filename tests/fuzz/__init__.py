"""A fuzzer of the four services: `python -m tests.fuzz --requests 100000`.

Requests are structured, mutated or random bytes, over every method of every service, with right, wrong and missing
metadata. Every reply must be OK or an error that names the caller's mistake, and no process may restart.
"""
