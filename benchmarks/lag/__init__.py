"""A policy that learns from the samples of older versions of itself: when does a correction matter?"""
