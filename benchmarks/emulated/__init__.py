"""A quartet whose models sleep: real Serve, real gRPC, real replicas, clients and loop; emulated times."""
