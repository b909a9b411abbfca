"""Messages and calls of the services: .proto files, and the code that grpcio-tools makes of them.

May import nothing. orchestrator, quartet and services import it.
"""
