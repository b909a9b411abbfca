"""The seam with transformers."""

from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig

from quartet.seams import transformers


def test_a_models_attention_is_named_and_models_without_one_are_known() -> None:
    small = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1}
    llama = LlamaConfig(**small, intermediate_size=8, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(llama, attn_implementation="eager", trust_remote_code=False)
    assert transformers.takes_attention(model)
    assert transformers.attention_of(model) == "eager"
    mamba = MambaConfig(**small, state_size=2)
    assert not transformers.takes_attention(AutoModelForCausalLM.from_config(mamba, trust_remote_code=False))
