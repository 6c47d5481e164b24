"""Published families: the same logits, losses and gradients as `transformers` computed, and files that both sides read."""
import json
import os

import numpy as np
import pytest
import record_pretrained
from device import host

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.ops.quantize import Scheme
from tinygrad_tf.pretrained import Pretrained, PretrainedError, WeightsError, from_pretrained, save_pretrained
from tinygrad_tf.pretrained.bert import bert
from tinygrad_tf.pretrained.families import FAMILIES
from tinygrad_tf.pretrained.loading import Renamed, built
from tinygrad_tf.quantization.model import quantize_model, quantized_linears

FOLDER = record_pretrained.FOLDER
NAMES = list(record_pretrained.MODELS)
every = pytest.mark.parametrize("name", NAMES)


def recorded(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)
    config = json.loads(arrays.pop("config").tobytes())
    weights = {key.removeprefix("weight "): arrays.pop(key) for key in list(arrays) if key.startswith("weight ")}
    grads = {key.removeprefix("gradient "): arrays.pop(key) for key in list(arrays) if key.startswith("gradient ")}
    return config, weights, grads, arrays


def write(folder, config, weights):
    from safetensors.numpy import save_file
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def published(tmp_path):
    """published(name): the folder as `transformers` writes it."""
    def make(name, change=lambda config, weights: None):
        config, weights, *_ = recorded(name)
        change(config, weights)
        return write(tmp_path / name, config, weights)
    return make


def result_of(model, arrays):
    """(logits or states [B, T, …], loss) on the recorded inputs."""
    ids, valid, targets = record_pretrained.inputs()
    tokens = ids if "types" not in arrays else np.stack([ids, arrays["types"]], axis=-1)
    tokens, valid, targets = (torch.as_tensor(x) for x in (tokens, valid, targets))
    out = model(tokens, valid_tokens=valid)
    out = out[0] if isinstance(out, tuple) else out
    width = out.shape[-1]
    loss = F.cross_entropy(out.reshape(-1, width), torch.where(targets >= 0, targets % width, targets).reshape(-1))
    return out, loss, host(valid)


def assert_close(found, expected, tolerance, what):
    """max |Δ| ÷ max |expected|"""
    assert found.shape == expected.shape, what
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    assert difference <= tolerance, (what, difference)


# --- the numbers ------------------------------------------------------------------------------------------------------------------

@every
def test_logits_and_gradients_are_those_of_transformers(published, name):
    """Logits within 1e-5, gradients within 1e-4 of the largest; of padded rows the real tokens."""
    known = from_pretrained(published(name), device=torch.get_default_device())
    config, _, grads, arrays = recorded(name)
    out, loss, valid = result_of(known.model, arrays)
    assert_close(host(out)[valid], arrays["result"][valid], 1e-5, "logits")
    assert loss.item() == pytest.approx(float(arrays["loss"]), rel=1e-5)
    loss.backward()
    family, largest = FAMILIES[config["model_type"]], max(np.abs(g).max() for g in grads.values())
    parameters, compared = dict(known.model.named_parameters()), set()
    grads = {key.removeprefix(family.prefix): g for key, g in grads.items()}
    for rule in family.rules(known.model, config):
        if not all(theirs in grads for theirs in rule.theirs):
            continue                                    # a parameter that this loss does not reach
        ours = [host(parameters[key].grad) for key in rule.ours]
        for theirs, found in zip(rule.theirs, rule.save(*ours)):
            assert np.abs(found - grads[theirs]).max() <= 1e-4 * largest, theirs
            compared.add(theirs)
    assert compared >= set(grads) - {"lm_head.weight", "pooler.dense.weight", "pooler.dense.bias"}


@every
def test_it_is_the_model_that_the_configuration_says(published, name):
    known = from_pretrained(published(name))
    config = recorded(name)[0]
    assert known.family == config["model_type"] and known.config == config and not known.model.training
    again = FAMILIES[known.family].config_of(known.model)
    for key in again.keys() & config.keys() - {"n_inner", "head_dim"}:
        assert again[key] == config[key], key
    assert known.tokenizer is None and known.chat_template is None


def test_a_window_and_types_and_experts_matter(published):
    """The references would not tell a model without them."""
    for name, change in {"mistral": {"sliding_window": None}, "mixtral": {"num_experts_per_tok": 1},
                         "llama_tied": {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}}.items():
        known = from_pretrained(published(name, lambda config, _, change=change: config.update(change)))
        arrays = recorded(name)[3]
        out, _, valid = result_of(known.model, arrays)
        assert np.abs(host(out)[valid] - arrays["result"][valid]).max() > 1e-2, name
    known, arrays = from_pretrained(published("bert")), recorded("bert")[3]
    out, _, valid = result_of(known.model, {**arrays, "types": 0 * arrays["types"]})
    assert np.abs(host(out)[valid] - arrays["result"][valid]).max() > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_tied", "qwen2", "bert"])
def test_rounded_while_it_is_read_is_rounded_afterwards(published, name):
    scheme = Scheme(8, granularity="channel")
    folder = published(name)
    at_once, later = from_pretrained(folder, quantize=scheme).model, quantize_model(from_pretrained(folder).model, scheme)
    assert quantized_linears(at_once).keys() == quantized_linears(later).keys() != set()
    ours, theirs = at_once.state_dict(), later.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not at_once.training and not any(layer.training for layer in quantized_linears(at_once).values())


# --- files --------------------------------------------------------------------------------------------------------------------------

@every
def test_what_is_saved_is_the_same_file(published, tmp_path, name):
    """Names and numbers; what is stored twice, or belongs to no part of the model, is left out."""
    known = from_pretrained(published(name))
    save_pretrained(known, tmp_path / "ours")
    from safetensors.numpy import load_file
    ours, theirs = load_file(tmp_path / "ours/model.safetensors"), recorded(name)[1]
    prefix = FAMILIES[known.family].prefix
    theirs = {(k if k.startswith(("lm_head", "cls.")) or k.startswith(prefix) else prefix + k): a for k, a in theirs.items()
              if "pooler" not in k and (k != "lm_head.weight" or not known.config.get("tie_word_embeddings"))}
    assert ours.keys() == theirs.keys()
    assert all(ours[key].dtype == a.dtype and (ours[key] == a).all() for key, a in theirs.items())
    again = from_pretrained(tmp_path / "ours")
    assert all(torch.equal(p, q) for p, q in zip(known.model.parameters(), again.model.parameters()))


OWN = {
    "gpt2": lambda: MiniGPT(61, 32, 16, 4, 64, 2, norm_first=True, activation="gelu_tanh"),
    "exact gelu": lambda: MiniGPT(61, 32, 16, 4, 24, 2, norm_first=True),
    "llama, neighbours turned": lambda: Decoder(61, 32, 16, 4, 24, 2, num_kv_heads=2),
    "halves turned, a head of its own": lambda: Decoder(61, 32, 16, 4, 24, 2, rope_layout="half_split", tie_weights=False),
    "qwen3": lambda: Decoder(61, 32, 16, 4, 24, 2, head_dim=8, qk_norm=lambda n: nn.RMSNorm(n, eps=1e-6)),
    "qwen2": lambda: Decoder(61, 32, 16, 4, 24, 2, qkv_bias=True),
    "mistral": lambda: Decoder(61, 32, 16, 4, 24, 2, window=4),
    "mixtral": lambda: Decoder(61, 32, 16, 4, 24, 2, ffn=lambda: nn.MoE(16, 24, 3, 2)),
    "bert": lambda: bert(61, 32, 16, 4, 24, 2),
}


def own_model(name):
    torch.manual_seed(0)
    model = OWN[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape)
    return model


def logits_of(model):
    ids, valid, _ = record_pretrained.inputs()
    out = model(torch.as_tensor(ids), valid_tokens=torch.as_tensor(valid))
    return host(out[0] if isinstance(out, tuple) else out)[valid]


@pytest.mark.parametrize("name", OWN)
def test_a_model_of_ones_own_is_saved_and_read(tmp_path, name):
    model = own_model(name)
    save_pretrained(model, tmp_path / "own")
    known = from_pretrained(tmp_path / "own")
    np.testing.assert_allclose(logits_of(known.model), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("name", OWN)
def test_transformers_reads_what_is_saved(tmp_path, name):
    """With the same logits, within 1e-5."""
    transformers = pytest.importorskip("transformers")
    import torch as pytorch
    model = own_model(name)
    save_pretrained(model, tmp_path / "own")
    kind = json.loads((tmp_path / "own/config.json").read_text())["architectures"][0]
    theirs, notes = getattr(transformers, kind).from_pretrained(tmp_path / "own", output_loading_info=True)
    assert not notes["unexpected_keys"] and all("pooler" in key for key in notes["missing_keys"])
    ids, valid, _ = record_pretrained.inputs()
    with pytorch.no_grad():
        out = theirs.eval()(input_ids=pytorch.tensor(ids), attention_mask=pytorch.tensor(valid).long())
    expected = (out.logits if hasattr(out, "logits") else out.last_hidden_state).numpy()[valid]
    assert_close(logits_of(model), expected, 1e-5, name)


@pytest.mark.torch
@every
def test_live(tmp_path, name):
    """Another random model than the recorded one."""
    pytest.importorskip("transformers")
    theirs = record_pretrained.made(name, seed=7)
    theirs.save_pretrained(tmp_path)
    types = np.arange(12) // 5 % 2 * np.ones((3, 1), np.int64) if name.startswith("bert") else None
    result, loss, _ = record_pretrained.computed(theirs, types)
    out, ours, valid = result_of(from_pretrained(tmp_path).model, {} if types is None else {"types": types})
    assert_close(host(out)[valid], result[valid], 1e-5, "logits")
    assert ours.item() == pytest.approx(loss, rel=1e-5)


# --- what does not fit --------------------------------------------------------------------------------------------------------------

def dropped(*names):
    return lambda config, weights: [weights.pop(name) for name in names]


def reshaped(name, shape):
    return lambda config, weights: weights.update({name: np.zeros(shape, np.float32)})


def configured(**values):
    return lambda config, weights: config.update(values)


def converted(name, dtype, added=0):
    return lambda config, weights: weights.update({name: weights[name].astype(dtype) + dtype(added)})


WRONG = {
    "a tensor is missing": ("llama", dropped("model.norm.weight"), "missing: norm.weight"),
    "many are": ("gpt2", lambda config, weights: [weights.pop(name) for name in list(weights) if "h.1" in name], "and 2 more"),
    "one is too many": ("bert", reshaped("bert.extra.weight", (3,)), "unexpected: extra.weight"),
    "a shape is another": ("llama", reshaped("model.layers.1.mlp.up_proj.weight", (24, 17)),
                           r"misshapen: layers.1.mlp.up_proj.weight .*17\]"),
    "no three parts": ("gpt2", reshaped("transformer.h.0.attn.c_attn.weight", (16, 47)), "misshapen: h.0.attn.c_attn.weight"),
    "experts of two sizes": ("mixtral", reshaped("model.layers.0.block_sparse_moe.experts.1.w1.weight", (23, 16)), "misshapen"),
    "a size is none": ("llama", configured(hidden_size=None), "hidden_size must be a positive int"),
    "a size is negative": ("gpt2", configured(n_layer=-1), "n_layer must be"),
    "a size is huge": ("gpt2", configured(n_embd=2**40), "n_embd must be"),
    "heads do not divide": ("bert", configured(num_attention_heads=3), "fits no bert"),
    "RoPE of a kind that is not known": ("llama", configured(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
                                         "rope_type = 'llama3'"),
    "an activation that is not known": ("gpt2", configured(activation_function="mish"), "activation_function must be one of"),
    "a bias that there is not": ("llama", configured(mlp_bias=True), "mlp_bias = True is not supported"),
    "a family that is not known": ("llama", configured(model_type="falcon"), "'falcon' are not known"),
    "no family": ("llama", configured(model_type=None), "does not say its model_type"),
    "layers without number": ("llama", configured(num_hidden_layers=2**30), r"num_hidden_layers = 1073741824, and there are \d+ tensors"),
    "experts without number": ("mixtral", configured(num_local_experts=2**30), "num_local_experts = 1073741824"),
    "a table that no memory holds": ("gpt2", configured(n_positions=2**30, n_embd=2**30), "fits no gpt2|misshapen"),
    "more layers than there are": ("llama", configured(num_hidden_layers=3), "missing: layers.2"),
    "fewer": ("llama", configured(num_hidden_layers=1), "unexpected: layers.1"),
    "scores that are not scaled": ("gpt2", configured(scale_attn_weights=False), "scale_attn_weights = False is not"),
    "an encoder that is none": ("bert", configured(is_decoder=True), "is_decoder = True is not"),
    "a head that is not tied": ("bert", configured(tie_word_embeddings=False), "tie_word_embeddings = False is not"),
    "a part is turned": ("llama", configured(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not"),
    "and in the record": ("llama", configured(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "_factor = 0.5"),
    "scores with a cap": ("qwen3", configured(attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0 is not"),
    "logits that are scaled": ("llama", configured(logits_scaling=8.0), "logits_scaling = 8.0 is not"),
    "residuals that are scaled": ("llama", configured(residual_multiplier=0.2), "residual_multiplier = 0.2 is not"),
    "rounded elsewhere": ("llama", configured(quantization_config={"bits": 4}), "quantization_config = .* is not"),
    "layers that look less far": ("qwen2", configured(layer_types=["full_attention", "sliding_attention"]), "layer_types = .* is not"),
    "layers that look farther": ("mistral", configured(layer_types=["full_attention", "full_attention"]), "layer_types = .* is not"),
    "a record that is a text": ("llama", configured(rope_parameters="x"), "rope_parameters must be an object"),
    "a base that is none": ("llama", configured(rope_parameters={"rope_theta": None}), "fits no llama"),
    "a tie that is a text": ("llama", configured(tie_word_embeddings="false"), "tie_word_embeddings must be true or false"),
    "an inner size below 0": ("gpt2", configured(n_inner=-1), "n_inner must be a positive int, got -1"),
    "types below 0": ("bert", configured(type_vocab_size=-1), "type_vocab_size must be a positive int, got -1"),
    "key heads below 0": ("llama", configured(num_key_value_heads=-2), "num_key_value_heads must be a positive int"),
    "eps below 0": ("gpt2", configured(layer_norm_epsilon=-1.0), "layer_norm_epsilon must be a positive float"),
    "eps that is a text": ("bert", configured(layer_norm_eps="1e-12"), "layer_norm_eps must be a positive float"),
    "eps that is no number": ("bert", configured(layer_norm_eps=float("nan")), "layer_norm_eps must be a positive float"),
    "whole numbers": ("llama", converted("model.norm.weight", np.int8), "norm.weight holds numbers of type int8"),
    "truths": ("gpt2", converted("transformer.ln_f.bias", bool), "ln_f.bias holds numbers of type bool"),
    "beyond float32": ("bert", converted("bert.embeddings.LayerNorm.bias", np.float64, 1e300), "LayerNorm.bias: .* beyond float32"),
    "a name twice": ("llama", reshaped("norm.weight", (16,)), "two tensors for one place"),
    "another vocabulary": ("llama", configured(vocab_size=60), "misshapen: embed_tokens.weight"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(published, case):
    name, change, said = WRONG[case]
    with pytest.raises(PretrainedError, match=said) as caught:
        from_pretrained(published(name, change))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500


def test_what_is_not_there(tmp_path):
    with pytest.raises(PretrainedError, match="there is no .*nowhere"):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds neither model.safetensors"):
        from_pretrained(tmp_path)
    write(tmp_path / "no_config", {}, {"a": np.zeros(3, np.float32)})
    with pytest.raises(PretrainedError, match="no configuration"):
        from_pretrained(tmp_path / "no_config")


def test_models_of_no_family_are_refused(tmp_path):
    for model in MiniGPT(11, 8, 8, 2, 16, 1), nn.Linear(2, 3), MiniGPT(11, 8, 8, 2, 16, 1, norm_first=True, ffn=lambda: nn.MoE(8, 16)):
        with pytest.raises(ValueError, match="no published family"):
            save_pretrained(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def decoder(**options):
    return Decoder(61, 32, **{**dict(dim=16, num_heads=4, hidden_dim=24, num_layers=2, num_kv_heads=2), **options})


def mixture(**options):
    return decoder(ffn=lambda: nn.MoE(16, 24, 3, 2, **options))


def gpt2():
    return MiniGPT(50, 16, 16, 4, 24, 2, norm_first=True)


def turning(**options):
    """A Decoder whose blocks turn q and k by a RoPE of their own."""
    model = decoder()
    for block in model.blocks:
        block.attention.rope = nn.RotaryEmbedding(4, **options)
    return model


def changed(model, path, value):
    place, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(place), attribute, value)
    return model


def normed(eps):
    return lambda features: nn.RMSNorm(features, eps=eps)


NO_FORMAT = {
    "a window beside normed q and k": (lambda: decoder(window=3, qk_norm=normed(1e-6)), "attention.window is 3, and would be None"),
    "a window beside biases": (lambda: decoder(window=3, qkv_bias=True), "attention.window is 3"),
    "shared experts": (lambda: mixture(shared_experts=1), "ffn.shared.0"),
    "another router": (lambda: mixture(router="softmax_topk"), "router.kind is 'softmax_topk', and would be 'topk_softmax'"),
    "a noisy one": (lambda: mixture(router="noisy_topk"), "router.kind"),
    "a bias of the router": (lambda: mixture(bias_rate=0.1), "bias_rate is 0.1"),
    "other experts": (lambda: mixture(ffn="geglu"), "experts.activation.class is GELU, and would be SiLU"),
    "experts without a gate": (lambda: mixture(ffn="silu"), "experts"),
    "experts with biases": (lambda: mixture(bias=True), "gate_proj.bias"),
    "capacity": (lambda: mixture(capacity_factor=1.5), "capacity_factor is 1.5"),
    "every expert for every token": (lambda: decoder(ffn=lambda: nn.DenseMoE(16, 24)), "no published family"),
    "experts and normed q": (lambda: decoder(ffn=lambda: nn.MoE(16, 24), qk_norm=normed(1e-6)), "q_norm"),
    "experts and biases": (lambda: decoder(ffn=lambda: nn.MoE(16, 24), qkv_bias=True), "q_proj.bias"),
    "experts in one block": (lambda: changed(mixture(), "blocks.1.ffn", nn.SwiGLU(16, 24)), "blocks.1.ffn.class"),
    "q centred": (lambda: decoder(qk_norm=nn.LayerNorm), "q_norm.class is LayerNorm"),
    "q with another eps": (lambda: decoder(qk_norm=normed(1e-3)), "q_norm.eps is 0.001, and would be 1e-06"),
    "q normed with biases": (lambda: decoder(qk_norm=normed(1e-6), qkv_bias=True), "q_proj.bias"),
    "a head with a bias": (lambda: changed(decoder(), "lm_head", nn.Linear(16, 61)), "lm_head.bias"),
    "a head of its own": (lambda: changed(gpt2(), "lm_head.weight", nn.Parameter(torch.randn(50, 16))), "lm_head.weight is a tensor of"),
    "a window in one block": (lambda: changed(decoder(), "blocks.1.attention.window", 4), "blocks.1.attention.window is 4"),
    "two windows": (lambda: changed(decoder(window=3), "blocks.1.attention.window", 4), "blocks.1.attention.window is 4, and would be 3"),
    "two activations": (lambda: changed(gpt2(), "blocks.1.ffn.net.1", nn.ReLU()), "blocks.1.ffn.net.1"),
    "an activation without a name": (lambda: changed(gpt2(), "blocks.0.ffn.net.1", nn.Sigmoid()), "no published family"),
    "two eps": (lambda: changed(decoder(), "blocks.1.norm2.eps", 1e-3), "blocks.1.norm2.eps"),
    "ALiBi": (lambda: decoder(relative_bias=nn.ALiBi(4)), "relative_bias"),
    "a function as a bias": (lambda: decoder(relative_bias=lambda q, k: 0), "relative_bias"),
    "stretched RoPE": (lambda: turning(scaling={"type": "linear", "factor": 2.0}), "rope.scaling"),
    "RoPE in part": (lambda: turning(rotary_dim=2), "rotary_dim is 2"),
    "RoPE of two bases": (lambda: changed(decoder(), "blocks.1.attention.rope", nn.RotaryEmbedding(4, 9.0)), "rope.base is 9.0"),
    "no RoPE": (lambda: changed(decoder(num_layers=1), "blocks.0.attention.rope", None), "no published family"),
    "8 bits": (lambda: quantize_model(decoder(), Scheme(8, granularity="channel")), "QuantizedLinear, and would be Linear"),
    "8 bits of BERT": (lambda: quantize_model(bert(50, 32, 16, 4, 24, 2), Scheme(8, granularity="channel")), "QuantizedLinear"),
    "no gate": (lambda: decoder(ffn=lambda: nn.FeedForward(16, 24)), "no published family"),
    "no layers": (lambda: decoder(num_layers=0), "no published family"),
    "no layers of GPT-2": (lambda: MiniGPT(5, 4, 4, 2, 4, 0, norm_first=True), "no published family"),
    "BERT with another activation": (lambda: changed(bert(50, 32, 16, 4, 24, 1), "blocks.0.ffn.net.1", nn.ReLU()), "class is ReLU"),
    "another way through": (lambda: changed(decoder(), "forward", lambda ids: ids), "forward"),
    "a configuration of another": (lambda: Pretrained(decoder(), {"rope_parameters": {"rope_theta": 5.0}}), "rope.base is 10000.0"),
}


@pytest.mark.parametrize("case", NO_FORMAT)
def test_what_the_format_cannot_say_is_not_saved(tmp_path, case):
    """Else what is read would be another model."""
    make, said = NO_FORMAT[case]
    with pytest.raises(ValueError, match=said) as caught:
        save_pretrained(make(), tmp_path / "x")
    assert not (tmp_path / "x").exists() and "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda: mixture(router="softmax_topk_renormalized"),
                                  lambda: decoder(ffn=lambda: nn.SwiGLU(16, 24), dropout=0.1),
                                  lambda: turning(max_seq_len=7, layout="half_split")])
def test_what_comes_to_the_same_is_saved(tmp_path, make):
    model = make().eval()
    save_pretrained(model, tmp_path)
    np.testing.assert_allclose(logits_of(from_pretrained(tmp_path).model), logits_of(model), rtol=1e-4, atol=1e-5)


def test_nothing_of_an_earlier_model_stays_beside_a_new_one(tmp_path):
    from tinygrad_tf.data import CharTokenizer
    save_pretrained(Pretrained(decoder(), {}, CharTokenizer.from_text("ab"), "{{ messages }}", longest_text=9), tmp_path)
    known = from_pretrained(tmp_path)
    assert known.tokenizer is not None and known.chat_template == "{{ messages }}" and known.longest_text == 9
    save_pretrained(decoder(), tmp_path)
    known = from_pretrained(tmp_path)
    assert (known.tokenizer, known.chat_template, known.longest_text) == (None, None, None)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


SMALL = "config.json", "tokenizer_config.json", "chat_template.jinja", "sentence_bert_config.json"


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices with names")
@pytest.mark.parametrize("name", SMALL)
def test_small_files_are_files_and_small(published, name):
    folder = published("bert")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(PretrainedError, match=f"{name} is no file, but a folder, a pipe or a device"):
        from_pretrained(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(PretrainedError, match=f"{name} is no file"):
        from_pretrained(folder)
    (folder / name).unlink()
    with open(folder / name, "wb") as file:
        file.truncate(1 << 34)                          # a hole: no byte of it is on the disk
    with pytest.raises(PretrainedError, match=f"{name} has more than 16 MiB"):
        from_pretrained(folder)


@pytest.mark.parametrize("name", SMALL)
def test_small_files_that_cannot_be_read_are_named(published, name):
    folder = published("bert")
    for damaged in (b"\xff",) if name.endswith("jinja") else (b"\xff", b"{", b"[1]", b"9" * 5000, b"[" * 100_000):
        (folder / name).write_bytes(damaged)
        with pytest.raises(PretrainedError, match=name):
            from_pretrained(folder)


def test_errors_are_one_family(tmp_path):
    """Whoever catches PretrainedError catches what is wrong with a file of weights, too."""
    assert issubclass(WeightsError, PretrainedError) and issubclass(PretrainedError, ValueError)
    write(tmp_path, {}, {"a": np.zeros(3, np.float32)})
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(PretrainedError, match="model.safetensors is"):
        from_pretrained(tmp_path)


def test_a_prefix_may_be_there_or_not(published):
    """GPT-2 was published without, and its masks are stored among the weights."""
    def bare(config, weights):
        for key in list(weights):
            weights[key.removeprefix("transformer.")] = weights.pop(key)
        weights["h.0.attn.bias"], weights["lm_head.weight"] = np.ones((1, 1, 4, 4), np.float32), weights["wte.weight"].copy()
    known = from_pretrained(published("gpt2", bare))
    arrays = recorded("gpt2")[3]
    out, _, valid = result_of(known.model, arrays)
    assert_close(host(out)[valid], arrays["result"][valid], 1e-5, "logits")


def test_first_weights_are_not_drawn():
    """To load a model takes no random number, and inside no thread but this one is told."""
    before = torch.get_rng_state()
    config = recorded("llama")[0]
    with nn.init.skipped():
        built(FAMILIES["llama"], config)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(nn.Linear(3, 3).weight, nn.Linear(3, 3).weight)


def test_renamed_reads_a_tensor_when_it_is_asked_for():
    class Lazy(dict):
        def __getitem__(self, name):
            raise AssertionError(name)
    names = Renamed(Lazy(a=1, b=2), lambda name: f"model.{name}", "model.")
    assert set(names) == {"a", "b"} and "a" in names.names and len(names) == 2


def test_a_pretrained_is_made_by_hand(tmp_path):
    save_pretrained(Pretrained(own_model("gpt2"), {"task": "mine"}), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["task"] == "mine"
