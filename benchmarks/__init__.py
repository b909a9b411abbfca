"""Commands that measure Quartet against something else, both sides in one run."""
