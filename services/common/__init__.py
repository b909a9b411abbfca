"""Code that services, clients and the orchestrator share. Each folder says what it may import."""
