"""vLLM's entry point (`vllm.general_plugins`): makes our engines known in every process of an engine."""


def register() -> None:
    """Registers `gloo` and `quartet-ipc`. vLLM loads plugins more than once in a process; then it is a no-op."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    for backend, engine in (("gloo", "GlooWeightTransferEngine"), ("quartet-ipc", "SharedWeightTransferEngine")):
        if backend not in Factory._registry:
            Factory.register_engine(backend, "services.common.weight_transfer.engine", engine)
