"""vLLM's entry point (`vllm.general_plugins`): makes the gloo engine known in every process of an engine."""


def register() -> None:
    """Registers the backend `gloo`. vLLM loads plugins more than once in a process; the second time is a no-op."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if "gloo" not in Factory._registry:
        Factory.register_engine("gloo", "services.common.weight_transfer.engine", "GlooWeightTransferEngine")
