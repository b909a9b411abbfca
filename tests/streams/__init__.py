"""Streams of OpenAI's protocol that are left or read to their end, while versions are pushed and replicas killed."""
