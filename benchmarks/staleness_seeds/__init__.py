"""The demo at several bounds on staleness and with several seeds: does it learn as well?"""
