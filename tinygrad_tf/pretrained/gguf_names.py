"""What a GGUF calls the tensors and sizes of a Llama, in the names of a config.json and of safetensors files."""
from .config import PretrainedError, require, require_equal

TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_A_BLOCK = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
              "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
              "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
SIZES = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
         "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
         "attention.layer_norm_rms_epsilon": "rms_norm_eps", "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
         "attention.key_length": "head_dim", "logit_scale": "logit_scale", "attn_logit_softcapping": "attn_logit_softcapping",
         "final_logit_softcapping": "final_logit_softcapping", "attention.scale": "attention_multiplier",
         "residual_scale": "residual_multiplier", "embedding_scale": "embedding_multiplier"}
# Who has the two features that RoPE turns together side by side; the others have them half a head apart, as their safetensors do.
LAYOUTS = {"llama": "interleaved", "qwen2": "half_split", "qwen3": "half_split"}


def is_gguf(weights):
    """Whether these are of a GGUF, whatever its file is called: only that says an architecture."""
    return "general.architecture" in weights.metadata


def config_of_gguf(weights):
    """The configuration that the metadata and the shapes say. Raises PretrainedError."""
    said = weights.metadata
    kind = said.get("general.architecture")
    if kind not in list(LAYOUTS):
        raise PretrainedError(f"{weights.path} holds a model of the kind {kind!r:.60}; of GGUF, {', '.join(LAYOUTS)} are read")
    if said.get(f"{kind}.rope.scaling.type", "none") != "none" or f"{kind}.expert_count" in said:
        raise PretrainedError(f"{weights.path} has RoPE of a scaled kind, or experts, which are read from safetensors alone")
    if said.get(f"{kind}.attention.sliding_window") or said.get(f"{kind}.rope.scale_linear", 1) != 1:
        raise PretrainedError(f"{weights.path} has attention in a window, or RoPE that is stretched, which are not read from a GGUF")
    if "token_embd.weight" not in weights:
        raise PretrainedError(f"{weights.path} lacks the tensor token_embd.weight")
    sizes = {name: said[f"{kind}.{key}"] for key, name in SIZES.items() if f"{kind}.{key}" in said}
    C, H = require(sizes, "hidden_size", int), require(sizes, "num_attention_heads", int)
    head_dim = require(sizes, "head_dim", int, C // H)
    require_equal({"rope.dimension_count": said.get(f"{kind}.rope.dimension_count", head_dim)}, kind, **{"rope.dimension_count": head_dim})
    return {"model_type": kind, "vocab_size": weights.shape("token_embd.weight")[0], "rope_layout": LAYOUTS[kind],
            "tie_word_embeddings": "output.weight" not in weights, **sizes}


def published_name(name):
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; what is not known stays."""
    first, *rest = name.split(".")
    if first == "blk" and len(rest) == 3 and rest[1] in OF_A_BLOCK:
        return f"model.layers.{rest[0]}.{OF_A_BLOCK[rest[1]]}.{rest[2]}"
    return ".".join([TENSORS.get(first, first), *rest])
