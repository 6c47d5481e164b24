"""Small random models of each family, made by `transformers`: their files, and what they compute. Writes tests/data/pretrained/<name>.npz.

    python tests/record_pretrained.py           needs torch, transformers and safetensors; the tests need none of them
"""
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "data" / "pretrained"
V, T, B = 61, 12, 3
LENGTHS = 12, 7, 1              # real tokens of each row, the rest is padding on the right
LLAMA = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BERT = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32}
# name → (class, configuration, its settings)
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32,
                                               "bos_token_id": None, "eos_token_id": None}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "rms_norm_eps": 1e-5}),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True, "head_dim": 6,
                                                       "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "bert_states": ("BertModel", "BertConfig", BERT),
}


def made(name, seed=0):
    """A random model in eval mode, whose weights are large enough to tell one function from another."""
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    kind, config, settings = MODELS[name]
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return model


def inputs():
    """ids, valid_tokens, targets [B, T]: −100 where the input or the target is padding."""
    draw = np.random.default_rng(0)
    ids = draw.integers(3, V, (B, T))
    valid = np.arange(T) < np.array(LENGTHS)[:, None]
    targets = np.where(valid, draw.integers(3, V, (B, T)), -100)
    return np.where(valid, ids, 0), valid, targets


def computed(model, types=None):
    """(logits or states, loss, gradients by the names in the file). The loss is that of given targets, one for each place."""
    import torch
    ids, valid, targets = (torch.tensor(x) for x in inputs())
    options = {} if types is None else {"token_type_ids": torch.tensor(types)}
    out = model(input_ids=ids, attention_mask=valid.long(), **options)
    result = out.logits if hasattr(out, "logits") else out.last_hidden_state
    model.zero_grad()
    width = result.shape[-1]
    targets = torch.where(targets >= 0, targets % width, targets)       # where states stand for logits there are fewer of them
    loss = torch.nn.functional.cross_entropy(result.reshape(-1, width), targets.reshape(-1))
    loss.backward()
    return result.detach().numpy(), loss.item(), gradients(model)


def gradients(model):
    """{name in the file: gradient}. In memory a Mixtral has the matrices of its experts side by side."""
    found = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        g = p.grad.numpy()
        if "mlp.experts." in name:
            parts = {"w2": g} if name.endswith("down_proj") else dict(zip(("w1", "w3"), np.split(g, 2, axis=1)))
            layer = name.partition(".mlp.")[0]
            found.update({f"{layer}.block_sparse_moe.experts.{e}.{w}.weight": one
                          for w, experts in parts.items() for e, one in enumerate(experts)})
        else:
            found[name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight")] = g
    return found


def files_of(model):
    """(configuration, {name: array}) as `save_pretrained` writes them."""
    from safetensors.numpy import load_file
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return json.loads(Path(folder, "config.json").read_text()), load_file(Path(folder, "model.safetensors"))


def main(names):
    FOLDER.mkdir(exist_ok=True)
    for name in names or MODELS:
        model = made(name)
        config, weights = files_of(model)
        types = np.arange(T) // 3 % 2 * np.ones((B, 1), np.int64) if name.startswith("bert") else None
        result, loss, grads = computed(model, types)
        arrays = {"config": np.frombuffer(json.dumps(config).encode(), np.uint8), "result": result, "loss": np.float64(loss),
                  **({} if types is None else {"types": types}),
                  **{f"weight {k}": v for k, v in weights.items()}, **{f"gradient {k}": v for k, v in grads.items()}}
        np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
        print(f"{name:12s} {(FOLDER / f'{name}.npz').stat().st_size:8,} bytes, loss {loss:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
