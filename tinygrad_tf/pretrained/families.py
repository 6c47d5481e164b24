"""GPT-2, Llama and its relatives, Mixtral, BERT: which of the library's models each is, and what its tensors are called there.

    build(config)           the model, from the sizes in a published config.json
    config_of(model)        the reverse
    rules(model, config)    a `Rule` for each tensor, or for those that belong together
"""
from collections.abc import Callable
from dataclasses import dataclass

from .. import nn
from ..models import Decoder, Encoder, MiniGPT
from ..nn.moe import MoE
from .bert import BertEmbedding, MaskedLM, bert
from .config import PretrainedError, activation_of, flag, name_of_activation, require, require_equal, sizes
from .rules import same, stacked, thirds, transposed, turned


@dataclass(frozen=True)
class Family:
    """One kind of published model. prefix: what its files may put before every name. ignored: endings of names that hold no weight."""
    build: Callable
    config_of: Callable
    rules: Callable
    prefix: str = "model."
    ignored: tuple = ()


# --- GPT-2 --------------------------------------------------------------------------------------------------------------------

def build_gpt2(c):
    require_equal(c, "gpt2", add_cross_attention=False, scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True,
                  tie_word_embeddings=True, quantization_config=None)
    V_vocab, T, C, H, L = sizes(c, "vocab_size", "n_positions", "n_embd", "n_head", "n_layer")
    Cff = 4 * C if c.get("n_inner") is None else require(c, "n_inner", int)
    return MiniGPT(V_vocab, T, C, H, Cff, L, dropout=0.0, norm_first=True,
                   activation=activation_of(c, "activation_function", "gelu_new"), norm_eps=require(c, "layer_norm_epsilon", float, 1e-5))


def config_of_gpt2(model):
    block, dim = model.blocks[0], model.embedding.token.weight.shape[1]
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": model.vocab_size, "n_positions": model.max_seq_len,
            "n_embd": dim, "n_head": block.attention.num_heads, "n_layer": len(model.blocks), "n_inner": block.ffn.net[0].out_features,
            "activation_function": name_of_activation(block.ffn.net[1]), "layer_norm_epsilon": model.final_norm.eps,
            "tie_word_embeddings": True}


def rules_of_gpt2(model, config):
    yield same("wte.weight", "embedding.token.weight")
    yield same("wpe.weight", "embedding.position.weight")
    for i in range(len(model.blocks)):
        theirs, ours = f"h.{i}", f"blocks.{i}"
        for kind in "weight", "bias":
            move = transposed if kind == "weight" else same
            yield same(f"{theirs}.ln_1.{kind}", f"{ours}.norm1.{kind}")
            yield thirds(f"{theirs}.attn.c_attn.{kind}", tuple(f"{ours}.attention.{p}_proj.{kind}" for p in "qkv"), conv1d=kind == "weight")
            yield move(f"{theirs}.attn.c_proj.{kind}", f"{ours}.attention.out_proj.{kind}")
            yield same(f"{theirs}.ln_2.{kind}", f"{ours}.norm2.{kind}")
            yield move(f"{theirs}.mlp.c_fc.{kind}", f"{ours}.ffn.net.0.{kind}")
            yield move(f"{theirs}.mlp.c_proj.{kind}", f"{ours}.ffn.net.3.{kind}")
    yield same("ln_f.weight", "final_norm.weight")
    yield same("ln_f.bias", "final_norm.bias")


# --- Llama, Mistral, Qwen-2, Qwen-3, Mixtral --------------------------------------------------------------------------------------

def build_llama(c):
    """The `Decoder`, with what each relative has besides."""
    kind, eps = c["model_type"], require(c, "rms_norm_eps", float)
    require_equal(c, kind, hidden_act="silu", mlp_bias=False, rope_scaling=None, attention_bias=False, use_sliding_window=False,
                  **PLAIN)
    V_vocab, T, C, H, Cff, L = sizes(c, "vocab_size", "max_position_embeddings", "hidden_size", "num_attention_heads", "intermediate_size",
                                     "num_hidden_layers")
    options = {"window": c.get("sliding_window")} if kind in ("mistral", "mixtral") else {}
    require_layers_alike(c, "full_attention" if options.get("window") is None else "sliding_attention")
    if kind == "qwen2":
        options["qkv_bias"] = True
    if kind == "qwen3":
        options["qk_norm"] = lambda features: nn.RMSNorm(features, eps=eps)
    if kind == "mixtral":
        experts = sizes(c, "num_local_experts", "num_experts_per_tok")
        options["ffn"] = lambda: MoE(C, Cff, *experts)
    return Decoder(V_vocab, T, C, H, Cff, L, 0.0, require(c, "num_key_value_heads", int, H), rope_base(c), norm_eps=eps,
                   head_dim=c.get("head_dim"), rope_layout=c.get("rope_layout", "half_split"),
                   tie_weights=flag(c, "tie_word_embeddings", False), **options)


# What relatives of Llama scale, cap or leave unturned, some under a model_type of Llama: the library's Decoder does none of it.
PLAIN = {"partial_rotary_factor": 1.0, "attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": None,
         "attention_multiplier": None, "clip_qkv": None, "logit_scale": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
         "embedding_multiplier": 1.0, "quantization_config": None}


def require_layers_alike(c, kind):
    """Newer configurations say for each layer how far it looks."""
    found = c.get("layer_types") or []
    if not isinstance(found, list) or any(layer != kind for layer in found):
        raise PretrainedError(f"{c['model_type']} with layer_types = {found!r:.60} is not supported, only {kind!r} in each")


def rope_base(c):
    """Where a configuration says it: files of transformers 5 have a record of all that RoPE needs."""
    record = c.get("rope_parameters") or {}
    if not isinstance(record, dict):
        raise PretrainedError(f"the configuration's rope_parameters must be an object, got {record!r:.60}")
    require_equal(record, "rope_parameters", rope_type="default", partial_rotary_factor=1.0)
    return float(record.get("rope_theta", c.get("rope_theta", 10000.0)))


def config_of_llama(model):
    block, attention = model.blocks[0], model.blocks[0].attention
    mixed = isinstance(block.ffn, MoE)
    kind = "mixtral" if mixed else "qwen3" if attention.q_norm is not None else "qwen2" if attention.q_proj.bias is not None else (
        "llama" if attention.window is None else "mistral")
    experts = {"num_local_experts": block.ffn.router.num_experts, "num_experts_per_tok": block.ffn.router.top_k} if mixed else {}
    window = {"sliding_window": attention.window} if kind in ("mistral", "mixtral") else {}
    width = (block.ffn.experts if mixed else block.ffn).up_proj.weight.shape[-2]
    return {"model_type": kind, "architectures": [ARCHITECTURES[kind]], "vocab_size": model.vocab_size, "hidden_size": attention.dim,
            "max_position_embeddings": model.max_seq_len, "num_attention_heads": attention.num_heads, "head_dim": attention.head_dim,
            "num_key_value_heads": attention.num_kv_heads, "num_hidden_layers": len(model.blocks), "intermediate_size": width,
            "rms_norm_eps": model.final_norm.eps, "rope_theta": attention.rope.base, "hidden_act": "silu",
            "tie_word_embeddings": model.lm_head.weight is model.embedding.weight, **experts, **window}


def rules_of_llama(model, config):
    attention = model.blocks[0].attention
    layout = "half_split" if config.get("rope_layout") == "interleaved" else attention.rope.layout
    yield same("embed_tokens.weight", "embedding.weight")
    for i, block in enumerate(model.blocks):
        theirs, ours = f"layers.{i}", f"blocks.{i}"
        yield same(f"{theirs}.input_layernorm.weight", f"{ours}.norm1.weight")
        for p in "q", "k":
            for kind in ("weight",) if attention.q_proj.bias is None else ("weight", "bias"):
                yield turned(f"{theirs}.self_attn.{p}_proj.{kind}", f"{ours}.attention.{p}_proj.{kind}", attention.head_dim, layout)
            if attention.q_norm is not None:
                yield turned(f"{theirs}.self_attn.{p}_norm.weight", f"{ours}.attention.{p}_norm.weight", attention.head_dim, layout)
        yield same(f"{theirs}.self_attn.v_proj.weight", f"{ours}.attention.v_proj.weight")
        if attention.v_proj.bias is not None:
            yield same(f"{theirs}.self_attn.v_proj.bias", f"{ours}.attention.v_proj.bias")
        yield same(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.out_proj.weight")
        yield same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.norm2.weight")
        yield from (rules_of_experts if isinstance(block.ffn, MoE) else rules_of_feed_forward)(theirs, ours, block.ffn)
    yield same("norm.weight", "final_norm.weight")
    if model.lm_head.weight is not model.embedding.weight:
        yield same("lm_head.weight", "lm_head.weight")


def rules_of_feed_forward(theirs, ours, ffn):
    for name in "gate_proj", "up_proj", "down_proj":
        yield same(f"{theirs}.mlp.{name}.weight", f"{ours}.ffn.{name}.weight")


def rules_of_experts(theirs, ours, ffn):
    """In Mixtral's files w1 is the gate, w3 the way up, w2 the way down."""
    yield same(f"{theirs}.block_sparse_moe.gate.weight", f"{ours}.ffn.router.weight")
    for number, name in ("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"):
        experts = tuple(f"{theirs}.block_sparse_moe.experts.{e}.{number}.weight" for e in range(ffn.router.num_experts))
        yield stacked(experts, f"{ours}.ffn.experts.{name}.weight")


# --- BERT -----------------------------------------------------------------------------------------------------------------------------

def build_bert(c):
    """The encoder, or with the head for hidden words where the configuration names it."""
    masked = "BertForMaskedLM" in (c.get("architectures") or ())
    require_equal(c, "bert", hidden_act="gelu", position_embedding_type="absolute", is_decoder=False, add_cross_attention=False,
                  quantization_config=None, **({"tie_word_embeddings": True} if masked else {}))
    eps = require(c, "layer_norm_eps", float, 1e-12)
    V_vocab, T, C, H, Cff, L = sizes(c, "vocab_size", "max_position_embeddings", "hidden_size", "num_attention_heads", "intermediate_size",
                                     "num_hidden_layers")
    encoder = bert(V_vocab, T, C, H, Cff, L, 0.0, require(c, "type_vocab_size", int, 2), eps)
    return MaskedLM(encoder, V_vocab, eps) if masked else encoder


def config_of_bert(model):
    encoder = getattr(model, "encoder", model)
    block, embedding = encoder.blocks[0], encoder.embedding
    return {"model_type": "bert", "architectures": ["BertModel" if encoder is model else "BertForMaskedLM"],
            "vocab_size": embedding.token.weight.shape[0], "max_position_embeddings": encoder.max_seq_len, "hidden_size": encoder.dim,
            "num_attention_heads": block.attention.num_heads, "intermediate_size": block.ffn.net[0].out_features,
            "num_hidden_layers": len(encoder.blocks), "type_vocab_size": embedding.type.weight.shape[0],
            "layer_norm_eps": embedding.norm.eps, "hidden_act": "gelu", "position_embedding_type": "absolute"}


def rules_of_bert(model, config):
    encoder, within = (model.encoder, "encoder.") if isinstance(model, MaskedLM) else (model, "")
    for theirs, ours in ("word_embeddings", "token"), ("position_embeddings", "position"), ("token_type_embeddings", "type"):
        yield same(f"embeddings.{theirs}.weight", f"{within}embedding.{ours}.weight")
    parts = {"embeddings.LayerNorm": "embedding.norm"}
    for i in range(len(encoder.blocks)):
        theirs, ours = f"encoder.layer.{i}", f"blocks.{i}"
        parts |= {f"{theirs}.attention.self.{name}": f"{ours}.attention.{name[0]}_proj" for name in ("query", "key", "value")}
        parts |= {f"{theirs}.attention.output.dense": f"{ours}.attention.out_proj", f"{theirs}.attention.output.LayerNorm": f"{ours}.norm1",
                  f"{theirs}.intermediate.dense": f"{ours}.ffn.net.0", f"{theirs}.output.dense": f"{ours}.ffn.net.3",
                  f"{theirs}.output.LayerNorm": f"{ours}.norm2"}
    parts = {theirs: within + ours for theirs, ours in parts.items()}
    if within:
        parts |= {"cls.predictions.transform.dense": "transform", "cls.predictions.transform.LayerNorm": "norm"}
        yield same("cls.predictions.bias", "decoder.bias")
    for theirs, ours in parts.items():
        for kind in "weight", "bias":
            yield same(f"{theirs}.{kind}", f"{ours}.{kind}")


# --- all of them --------------------------------------------------------------------------------------------------------------------

LLAMA = Family(build_llama, config_of_llama, rules_of_llama, ignored=("rotary_emb.inv_freq",))
FAMILIES = {
    "gpt2": Family(build_gpt2, config_of_gpt2, rules_of_gpt2, "transformer.", (".attn.bias", ".attn.masked_bias", "lm_head.weight")),
    "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "mixtral": LLAMA,
    "bert": Family(build_bert, config_of_bert, rules_of_bert, "bert.",
                   ("position_ids", "pooler.dense.weight", "pooler.dense.bias", "cls.predictions.decoder.weight",
                    "cls.predictions.decoder.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias")),
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "mixtral": "MixtralForCausalLM"}


def family_of(model):
    """The family whose files a model's weights can stand in. ValueError for a model that is none of them."""
    first = next(iter(getattr(model, "blocks", ())), None)
    if isinstance(model, MiniGPT) and getattr(first, "norm_first", False) and isinstance(first.ffn, nn.FeedForward):
        return FAMILIES["gpt2"]
    if isinstance(model, Decoder):
        return LLAMA
    if isinstance(model, MaskedLM) or isinstance(model, Encoder) and isinstance(model.embedding, BertEmbedding):
        return FAMILIES["bert"]
    raise ValueError(f"save_pretrained: {type(model).__name__} as it is here is of no published family: GPT-2 is a pre-norm MiniGPT "
                     f"without experts, Llama, Qwen, Mistral and Mixtral are a Decoder, BERT is pretrained.bert")
