"""Everything above the operations on another device: layers, models, training, generation, checkpoints, and devices that are mixed.

In an ordinary run of the suite the device is the strict stand-in for CuPy, in which NumPy computes; `pytest --device cuda` runs the
same on a GPU.
"""
import importlib.util
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
from device import host

import tinygrad_tf as torch
from tinygrad_tf import cuda, nn
from tinygrad_tf.data import BatchSampler
from tinygrad_tf.generation import KVCache, generate, greedy_decode, sample, stream
from tinygrad_tf.models import Decoder, Encoder, EncoderClassifier, EncoderDecoder, MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.optim import SGD, Adam, AdamW, decay_groups
from tinygrad_tf.training import Trainer, evaluate, load_checkpoint
from tinygrad_tf.training.state import load_model

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: the stand-in runs fused kernels with it"),
              pytest.mark.usefixtures("gpu")]
ROOT = Path(__file__).resolve().parents[1]
V, T = 11, 8


def close(a, b):
    """Equal up to rounding: fused kernels add in another order, and Adam makes a step of what should be zero (the bias of keys)."""
    np.testing.assert_allclose(host(a), host(b), rtol=1e-4, atol=2e-5)


def ids(*shape, seed=0):
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


def texts():
    return ids(2, T), ids(2, T, seed=1)


# name → (model, its inputs): all return (logits, loss)
MODELS = {
    "MiniGPT": (lambda: MiniGPT(V, T, 16, 4, 32, 2, dropout=0.0), texts),
    "pre-norm": (lambda: MiniGPT(V, T, 16, 4, 32, 2, dropout=0.0, norm_first=True), texts),
    "padded": (lambda: MiniGPT(V, T, 16, 4, 32, 2, dropout=0.0), lambda: (*texts(), torch.arange(T) > torch.tensor([[2], [-1]]))),
    "Decoder": (lambda: Decoder(V, T, 16, 4, 32, 2, num_kv_heads=2), texts),
    "padded Decoder": (lambda: Decoder(V, T, 16, 4, 32, 2), lambda: (*texts(), torch.arange(T) > torch.tensor([[2], [-1]]))),
    "Encoder": (lambda: EncoderClassifier(Encoder(V, T, 16, 4, 32, 2, dropout=0.0), 3), lambda: (ids(2, T), torch.tensor([0, 2]))),
    "EncoderDecoder": (lambda: EncoderDecoder(V, V, T, T, 16, 4, 32, 2, dropout=0.0),
                       lambda: (ids(2, T), ids(2, 5, seed=1), ids(2, 5, seed=2))),
}
models = pytest.mark.parametrize("name", MODELS)


def built(name, device):
    """The model with its first weights, and its inputs."""
    torch.manual_seed(1)
    model, inputs = MODELS[name]
    return model().to(device), [x.to(device) for x in inputs()]


def one_step(model, inputs, optimizer):
    optimizer.zero_grad()
    _, loss = model(*inputs)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss, norm


# --- the same numbers -----------------------------------------------------------------------------------------------------

@models
@pytest.mark.parametrize("kind, options", [(AdamW, {}), (Adam, {"amsgrad": True}), (SGD, {"momentum": 0.9})], ids=["AdamW", "Adam", "SGD"])
def test_two_steps_are_those_of_the_cpu(name, kind, options):
    results = []
    for device in ("cpu", "cuda"):
        model, inputs = built(name, device)
        optimizer = kind(decay_groups(model, 0.1), lr=1e-2, **options)
        losses = [x for _ in range(2) for x in one_step(model, inputs, optimizer)]
        assert {x.device.type for x in (*losses, *model.parameters(), *(p.grad for p in model.parameters()))} == {device}
        results.append([*losses, *model.parameters(), *(p.grad for p in model.parameters())])
    for cpu, gpu in zip(*results):
        close(gpu, cpu)


@models
def test_weights_do_not_depend_on_where_a_model_is_made(name):
    moved, _ = built(name, "cuda")
    torch.set_default_device("cuda")
    made, _ = built(name, "cuda")
    assert all((host(a) == host(b)).all() for a, b in zip(moved.parameters(), made.parameters()))
    assert {p.device.type for p in made.parameters()} == {"cuda"}


INITIALISERS = {name: lambda x, name=name: getattr(nn.init, name)(x) for name in (
    "uniform_", "normal_", "ones_", "zeros_", "eye_", "trunc_normal_", "xavier_normal_", "xavier_uniform_", "kaiming_normal_",
    "kaiming_uniform_")}
INITIALISERS["a narrow trunc_normal_"] = lambda x: nn.init.trunc_normal_(x, a=1.5, b=3.0)
RANDOM = {"rand": torch.rand, "randn": torch.randn, "randint": lambda *shape, device: torch.randint(0, 9, shape, device=device),
          "randperm": lambda *shape, device: torch.randperm(17, device=device),
          "bernoulli": lambda *shape, device: torch.bernoulli(torch.full(shape, 0.3, device=device))}


@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers_draw_the_same_numbers(name):
    drawn = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(3)
        drawn.append(INITIALISERS[name](torch.empty(7, 5, device=device)))
        assert drawn[-1].device.type == device
    assert (host(drawn[0]) == host(drawn[1])).all()


@pytest.mark.parametrize("name", RANDOM)
def test_random_tensors_are_the_same_numbers(name):
    drawn = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(3)
        drawn.append(RANDOM[name](4, 9, device=device))
        assert drawn[-1].device.type == device
    assert (host(drawn[0]) == host(drawn[1])).all() and torch.initial_seed() == 3


def test_dropout_on_a_device_follows_the_seed():
    x, seen = torch.ones(40, 50, device="cuda"), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(host(F.dropout(x, 0.25)))
    assert (seen[0] == seen[1]).all() and (seen[0] != seen[2]).any()
    assert abs((seen[0] == 0).mean() - 0.25) < 0.03 and set(np.unique(seen[0])) == {np.float32(0), np.float32(1 / 0.75)}


def test_a_module_moves_whole_and_keeps_its_ties():
    model, inputs = built("MiniGPT", "cpu")
    model(*inputs)[1].backward()
    parameter = model.lm_head.weight
    model.to("cuda")
    assert model.lm_head.weight is parameter is model.embedding.token.weight
    assert all(t.device.type == "cuda" for p in model.parameters() for t in (p, p.grad))
    encoding = nn.SinusoidalPositionEncoding(4).cuda()
    assert encoding.pe.is_cuda and nn.ALiBi(2).to("cuda").slopes.is_cuda and not encoding.cpu().pe.is_cuda


def test_rope_has_tables_on_each_device():
    rope, x = nn.RotaryEmbedding(8), torch.randn(2, 3, 4, 8)
    places = torch.tensor([[0, 0, 1, 2], [4, 5, 6, 7]])
    for at in ({}, {"offset": 5}, {"position_ids": places}):
        close(rope(x.to("cuda"), **{k: v.to("cuda") if k == "position_ids" else v for k, v in at.items()}), rope(x, **at))


# --- generation -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["MiniGPT", "Decoder"])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 3}, {"use_cache": False}],
                         ids=str)
def test_the_same_text_is_written(name, options):
    written = []
    for device in ("cpu", "cuda"):
        model, _ = built(name, device)
        found = generate(model, ids(2, 3).to(device), 2 * T, generator=torch.Generator().manual_seed(5), **options)
        assert found.device.type == device
        written.append(found.tolist())
    assert written[0] == written[1]


def test_the_same_translation_is_written():
    written = []
    for device in ("cpu", "cuda"):
        model, (source, *_) = built("EncoderDecoder", device)
        written.append(greedy_decode(model, source, bos_id=0, eos_id=1, max_new_tokens=6).tolist())
    assert written[0] == written[1]


def test_sampling_downloads_one_row_of_logits_a_step():
    counts = torch.backend.require_cupy().counts if hasattr(torch.backend.require_cupy(), "counts") else None
    if counts is None:
        pytest.skip("only the stand-in counts")
    logits = torch.randn(2, V, device="cuda")
    for options in ({"temperature": 0}, {"temperature": 0.7, "top_k": 4}):
        before = counts.syncs, counts.uploads
        assert sample(logits, **options).is_cuda
        assert (counts.syncs - before[0], counts.uploads - before[1]) == (1, 1)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_prompt_is_continued_where_it_is_whatever_the_device_of_the_model(use_cache):
    model, prompt = built("MiniGPT", "cuda")[0], ids(1, 3)
    written = [list(stream(model, where, 2, temperature=0, use_cache=use_cache)) for where in (prompt, prompt.cuda())]
    assert [[x.device.type for x in tokens] for tokens in written] == [["cpu"] * 2, ["cuda"] * 2]
    assert [x.item() for x in written[0]] == [x.item() for x in written[1]]


# --- how often the host waits -----------------------------------------------------------------------------------------------

# A step waits for: are positions in the table, does any target count; the norm; .item() of loss and norm. Ids that were just uploaded are
# known to the host. Dense attention under a mask, for small scores, asks three times whether what is blocked holds a NaN; the kernel never.
WAITS, WAITS_OF_DENSE_ATTENTION = 5, 3


def waits_of_a_step(layers, kind):
    """How often the host waits in one training step with numbers of loss and norm, as the trainer's."""
    counts = torch.backend.require_cupy().counts
    model = kind(V, T, 16, 4, 32, layers, dropout=0.0).to("cuda")
    optimizer = AdamW(decay_groups(model, 0.1))
    sampler = BatchSampler(np.arange(40) % V, T, 2)
    for _ in range(2):                          # the second step has all state, and all tables
        before = counts.syncs
        inputs, targets = (torch.as_tensor(x, device="cuda") for x in sampler.next())
        for number in one_step(model, (inputs, targets), optimizer):
            number.item()
    return counts.syncs - before


@pytest.mark.parametrize("kind", [MiniGPT, Decoder])
def test_a_training_step_waits_a_few_times(kind):
    if not hasattr(torch.backend.require_cupy(), "counts"):
        pytest.skip("only the stand-in counts")
    for layers in (1, 4):
        assert waits_of_a_step(layers, kind) <= WAITS + layers * WAITS_OF_DENSE_ATTENTION


@pytest.mark.parametrize("kind", [MiniGPT, Decoder])
def test_with_the_attention_kernel_the_number_of_layers_does_not_count(kind):
    if not hasattr(torch.backend.require_cupy(), "counts"):
        pytest.skip("only the stand-in counts")
    with F.sdpa_backend("cuda"):
        small, large = waits_of_a_step(1, kind), waits_of_a_step(3, kind)
    assert small == large <= WAITS


def test_clipping_waits_once_and_stepping_never():
    cupy = torch.backend.require_cupy()
    if not hasattr(cupy, "counts"):
        pytest.skip("only the stand-in counts")
    parameters = [nn.Parameter(torch.randn(3, 2, device="cuda")) for _ in range(5)]
    rate = torch.tensor(0.1, device="cuda")
    for kind, waits in (AdamW, 0), (SGD, 0), (lambda p: AdamW(p, lr=rate), 1):
        optimizer = kind(parameters)
        for p in parameters:
            p.grad = torch.randn(3, 2, device="cuda")
        before = cupy.counts.syncs
        total = nn.utils.clip_grad_norm_(parameters, 0.1)
        assert cupy.counts.syncs == before + 1 and total.is_cuda
        optimizer.step()
        assert cupy.counts.syncs == before + 1 + waits


# --- optimizer states and checkpoints go both ways ---------------------------------------------------------------------------

BOTH_WAYS = pytest.mark.parametrize("here, there", [("cpu", "cuda"), ("cuda", "cpu")])


@BOTH_WAYS
@pytest.mark.parametrize("kind", [AdamW, lambda p: SGD(p, momentum=0.9)], ids=["AdamW", "SGD"])
def test_states_made_on_one_device_are_loaded_on_the_other(kind, here, there):
    model, inputs = built("MiniGPT", here)
    optimizer = kind(model.parameters())
    one_step(model, inputs, optimizer)
    other, other_inputs = built("MiniGPT", there)
    other.load_state_dict(model.state_dict())
    other_optimizer = kind(other.parameters())
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert {v.device.type for entry in other_optimizer.state.values() for name, v in entry.items() if name != "step"} == {there}
    for (a, _), (b, _) in [(one_step(model, inputs, optimizer), one_step(other, other_inputs, other_optimizer)) for _ in range(2)]:
        close(a, b)
    for a, b in zip(model.parameters(), other.parameters()):
        close(a, b)


@BOTH_WAYS
def test_a_run_is_resumed_on_the_other_device(tmp_path, here, there):
    trainer = runs.trainer(tmp_path, steps=6, eval_every=2, device=here)
    trainer.run(should_stop=runs.stop_at(3, trainer))
    resumed = Trainer.resume(trainer.folder, device=there)
    assert resumed.step == 3 and {p.device.type for p in resumed.model.parameters()} == {there}
    assert resumed.run()
    whole = runs.trainer(tmp_path, steps=6, eval_every=2, out="whole", device=here)
    assert whole.run()
    np.testing.assert_allclose(resumed.metrics.table(), whole.metrics.table(), rtol=1e-4)
    model, tokenizer, state = load_model(trainer.folder, device=here)
    assert state["step"] == 6 and next(model.parameters()).device.type == here
    assert "device" not in str(sorted(state["config"])), "a run belongs to no device"


def test_a_checkpoint_holds_host_arrays_whatever_the_device(tmp_path):
    found = {}
    for device in ("cpu", "cuda"):
        trainer = runs.trainer(tmp_path, steps=3, eval_every=3, out=device, device=device)
        assert trainer.run() and trainer.device.type == device
        found[device], _ = load_checkpoint(trainer.folder / "checkpoint.safetensors")
    assert found["cpu"].keys() == found["cuda"].keys()
    for name, array in found["cuda"].items():
        assert type(array) is np.ndarray
        close(array, found["cpu"][name])


@BOTH_WAYS
def test_saved_tensors_come_back_anywhere(tmp_path, here, there):
    path = tmp_path / "x.safetensors"
    torch.save({"x": torch.arange(4, device=here)}, path)
    x = torch.load(path, map_location=there)["x"]
    assert x.device.type == there and x.tolist() == [0, 1, 2, 3]
    assert torch.load(path)["x"].device.type == "cpu"


def test_evaluation_goes_where_the_model_is():
    found = [evaluate(built("MiniGPT", device)[0], np.arange(50) % V, T) for device in ("cpu", "cuda")]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


# --- mixed devices: one sentence, with the operation and both devices -----------------------------------------------------------

def mixed_cache():
    model, (tokens, _) = built("MiniGPT", "cpu")
    cache = KVCache(2, T)
    with torch.no_grad():
        model.eval()(tokens[:, :3], cache=cache)
        model.to("cuda")(tokens[:, 3:4].to("cuda"), cache=cache)


def moved_after_the_first_step(kind):
    model, inputs = built("MiniGPT", "cpu")
    optimizer = kind(model.parameters())
    one_step(model, inputs, optimizer)
    one_step(model.to("cuda"), [x.to("cuda") for x in inputs], optimizer)


MIXED = {
    "a layer on a GPU": (lambda: nn.Linear(2, 2).cuda()(torch.ones(1, 2)), "Linear"),
    "an input on a GPU": (lambda: nn.Linear(2, 2)(torch.ones(1, 2, device="cuda")), "Linear"),
    "ids": (lambda: built("MiniGPT", "cuda")[0](ids(1, 3)), "Embedding"),
    "targets": (lambda: built("MiniGPT", "cuda")[0](ids(1, 3).cuda(), ids(1, 3)), "CrossEntropy"),
    "attention": (lambda: F.scaled_dot_product_attention(*(torch.ones(1, 1, 2, 4, device=d) for d in ("cuda", "cuda", "cpu"))), "ttention"),
    "a cache": (mixed_cache, "KVCache"),
    "AdamW": (lambda: moved_after_the_first_step(AdamW), "AdamW .*before the first step"),
    "SGD": (lambda: moved_after_the_first_step(lambda p: SGD(p, momentum=0.9)), "SGD .*before the first step"),
    "a norm of gradients": (lambda: nn.utils.get_total_norm([torch.ones(2), torch.ones(2, device="cuda")]), "get_total_norm"),
    "addition": (lambda: torch.ones(2) + torch.ones(2, device="cuda"), "Add"),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_told_in_one_sentence(name):
    mix, op = MIXED[name]
    with pytest.raises(RuntimeError, match=f"(?s){op}.*one device, got (cpu and cuda:0|cuda:0 and cpu); move one of them with") as caught:
        mix()
    assert "\n" not in str(caught.value).split("\n\n")[0]


def test_nothing_is_updated_where_devices_are_mixed():
    model, inputs = built("MiniGPT", "cpu")
    optimizer = AdamW(model.parameters())
    one_step(model, inputs, optimizer)
    model.to("cuda")
    before = [host(p).copy() for p in model.parameters()]
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert all((host(p) == b).all() for p, b in zip(model.parameters(), before))


# --- names of devices -----------------------------------------------------------------------------------------------------

# Arguments of device(...), and the (type, index) that it makes of them or the error that it raises.
NAMES = [(arguments, wanted) for wanted, several in [
    (("cpu", None), [("cpu",), ("cpu", None)]), (("cuda", None), [("cuda",), ("cuda", None)]), (("cpu", 1), [("cpu:1",), ("cpu", 1)]),
    (("cuda", 0), [("cuda:0",), ("cuda", 0)]), (("cuda", 12), [("cuda:12",), ("cuda", 12), ("cuda", np.int64(12))]),
    (TypeError, [("cuda", "x"), ("cuda", "1"), ("cuda", 1.0), ("cuda", True), ("cuda:1", "x"), (None,), (1.5,), (True,), (),
                 ("cuda", 1, 2)]),
    (RuntimeError, [("cuda", -1), ("cpu", -1), ("cuda", -200), ("cuda:1", 2), ("cuda:1", 1), ("cpu:0", 0), ("cuda:",), ("cuda:\u00b2",),
                    ("cuda:\u0661",), ("cuda:-1",), ("cuda:01",), ("cuda:+1",), ("cuda:1:2",), ("cuda:1 ",), ("cuda:1\n",), (" cuda",),
                    ("CUDA",), ("",), ("gpu",), ("cuda:" + "9" * 20,), ("cuda:" + "9" * 5000,)]),
] for arguments in several]


def made(device, arguments):
    try:
        found = device(*arguments)
    except (TypeError, RuntimeError, ValueError) as error:
        return type(error)
    return found.type, found.index


@pytest.mark.parametrize("arguments, wanted", NAMES, ids=lambda x: repr(x)[:30] if isinstance(x, tuple) else x.__name__)
def test_a_device_or_an_error_is_made_of_any_arguments(arguments, wanted):
    assert made(torch.device, arguments) == wanted


def test_a_device_of_a_device_takes_no_other_number():
    assert made(torch.device, (torch.device("cuda:1"),)) == ("cuda", 1)
    assert made(torch.device, (torch.device("cuda"), 1)) is TypeError


@pytest.mark.torch
def test_devices_and_their_errors_are_pytorchs():
    import torch as pytorch
    assert [(arguments, made(pytorch.device, arguments)) for arguments, _ in NAMES] == NAMES
    assert made(pytorch.device, (pytorch.device("cuda"), 1)) is TypeError


# --- tinygrad_tf.cuda -----------------------------------------------------------------------------------------------------

def test_the_gpu_under_pytorchs_names():
    assert cuda.is_available() and cuda.device_count() >= 1 and cuda.current_device() == 0
    assert isinstance(cuda.get_device_name(), str) and cuda.get_device_name("cuda:0") == cuda.get_device_name(0)
    major, minor = cuda.get_device_capability()
    assert (major, minor) >= (3, 0)
    cuda.synchronize(), cuda.synchronize(0), cuda.set_device("cuda:0")
    with pytest.raises(ValueError, match="'cpu'"):
        cuda.get_device_name("cpu")


TAKES_DEVICE = [name for name, f in vars(cuda).items() if inspect.isfunction(f) and f.__module__ == cuda.__name__
                and not name.startswith("_") and "device" in inspect.signature(f).parameters]
BAD_DEVICES = {"bogus": RuntimeError, "": RuntimeError, "cuda:": RuntimeError, "1": RuntimeError, "cuda:-1": RuntimeError, -1: RuntimeError,
               "cpu": ValueError, torch.device("cpu"): ValueError, 1.5: ValueError, (1,): ValueError, True: ValueError, b"cuda": ValueError}


def test_the_functions_that_take_a_device_are_found():
    assert set(TAKES_DEVICE) >= {"set_device", "get_device_name", "get_device_capability", "synchronize", "memory_allocated",
                                 "memory_reserved"}


@pytest.mark.parametrize("there", [True, False], ids=["with a GPU", "without"])
@pytest.mark.parametrize("name", TAKES_DEVICE)
def test_what_is_no_gpu_is_refused_by_every_function_that_takes_one(name, there, monkeypatch):
    if not there:
        monkeypatch.setitem(sys.modules, "cupy", None)
        monkeypatch.setattr(cuda, "is_available", lambda: False)
    for device, error in BAD_DEVICES.items():
        with pytest.raises(error) as caught:
            getattr(cuda, name)(device)
        assert type(caught.value) is error and "CuPy" not in str(caught.value)
        assert repr(device) in str(caught.value) or str(device) in str(caught.value)


@pytest.mark.parametrize("device", [None, "cuda", torch.device("cuda")], ids=str)
def test_set_device_wants_a_number(device):
    with pytest.raises(ValueError, match="number"):
        cuda.set_device(device)


ASKING_FOR = {
    "zeros": lambda d: torch.zeros(2, device=d), "tensor": lambda d: torch.tensor([1.0], device=d),
    "rand": lambda d: torch.rand(2, device=d), "to": lambda d: torch.ones(2).to(d),
    "cuda": lambda d: torch.ones(2).cuda(d.index), "a layer": lambda d: nn.Linear(2, 2).to(d),
    "a move": lambda d: torch.ones(2, device="cuda").to(d), "a default device": lambda d: (torch.set_default_device(d), torch.ones(1)),
    **{f"cuda.{name}": lambda d, name=name: getattr(cuda, name)(d) for name in TAKES_DEVICE},
    **{f"cuda.{name}, a number": lambda d, name=name: getattr(cuda, name)(d.index) for name in TAKES_DEVICE},
}


@pytest.mark.parametrize("name", ASKING_FOR)
@pytest.mark.parametrize("beyond", [0, 8])
def test_a_gpu_that_is_not_there_is_told_in_one_sentence(name, beyond):
    there = cuda.device_count()
    number = there + beyond
    with pytest.raises(RuntimeError, match=f"^device 'cuda:{number}' was asked for, but there (is one GPU|are {there} GPUs): 'cuda:0'"):
        ASKING_FOR[name](torch.device("cuda", number))


def test_of_several_gpus_each_is_named(pytestconfig):
    if pytestconfig.getoption("--device") == "cuda":
        pytest.skip("only the stand-in has as many as it is told")
    with torch.backend.require_cupy().changed(devices=2), pytest.raises(RuntimeError, match="there are 2 GPUs: 'cuda:0' and 'cuda:1'$"):
        assert torch.ones(1, device="cuda:1").device.index == 1
        torch.ones(1, device="cuda:2")


def test_memory_is_counted():
    before = cuda.memory_allocated()
    x = torch.zeros(1000, device="cuda")
    assert cuda.memory_allocated() >= before + 4000 and cuda.memory_reserved() >= cuda.memory_allocated()
    del x
    cuda.empty_cache()
    assert cuda.memory_allocated() == before


def test_one_seed_for_all_devices():
    cuda.manual_seed(7)
    a = torch.randn(3, device="cuda")
    cuda.manual_seed_all(7)
    assert (host(torch.randn(3)) == host(a)).all()


WITHOUT = """
import sys
sys.modules["cupy"] = None
import tinygrad_tf as torch
from tinygrad_tf import cuda
assert not cuda.is_available() and cuda.device_count() == cuda.memory_allocated() == cuda.memory_reserved() == 0
cuda.synchronize(), cuda.empty_cache(), cuda.manual_seed(1)
device = "cuda" if cuda.is_available() else "cpu"
assert torch.nn.Linear(2, 3).to(device)(torch.ones(1, 2, device=device)).device.type == "cpu"
for ask in (lambda: cuda.get_device_name(), lambda: torch.nn.Linear(1, 1).to("cuda"), lambda: torch.ones(1, device="cuda")):
    try:
        ask()
    except RuntimeError as error:
        assert "needs CuPy" in str(error) and "cupy-cuda12x" in str(error) and "cupy-cuda13x" in str(error), error
    else:
        raise AssertionError("nothing was said")
"""


def test_without_a_gpu_questions_are_answered_and_the_rest_says_what_to_install():
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, env=runs.environment(), timeout=60)


@pytest.mark.parametrize("missing, words", [("raise ImportError", "needs CuPy"), (
    "class cuda: is_available = staticmethod(lambda: False)", "finds no NVIDIA GPU")], ids=["CuPy", "a GPU"])
def test_a_run_of_the_suite_on_a_gpu_that_is_not_there_ends_in_one_sentence(missing, words, tmp_path):
    (tmp_path / "cupy.py").write_text(missing, encoding="utf-8")
    env = runs.environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", "cuda", "--collect-only", "tests/device.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert [line for line in done.stderr.splitlines() if line][0].startswith("ERROR: --device cuda: ") and words in done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr


# --- every example ----------------------------------------------------------------------------------------------------------

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
NEEDS = {"07_digits_encoder.py": "sklearn", "09_dates_encoder_decoder.py": "babel"}
HOST_ONLY = {"12_cuda_kernel_on_cpu.py": "it is about the CPU", "22_gradient_checkpointing.py": "it measures the memory of the host",
             "23_byte_pair_encoding.py": "text and ids, and no tensor",
             "28_chat_model.py": "half a gigabyte of weights; tests/test_pretrained.py has its family on devices",
             "26_doctor.py": "hundreds of passes: tests/test_doctor.py runs each check on a device",
             "30_shards.py": "threads share the cores of a CPU"}
ON_STAND_IN = """
import runpy, sys
import strict_cupy
strict_cupy.install()
from tinygrad_tf.optim import Optimizer
step = Optimizer.step

def a_few_steps(self, closure=None):
    self.steps_made = getattr(self, "steps_made", 0) + 1
    if self.steps_made > 5:                 # enough to have met every line of the loop; the stand-in is slow
        sys.exit(0)
    return step(self, closure)

Optimizer.step = a_few_steps
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.host("processes of their own, with a stand-in of their own")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_on_a_device(path, tmp_path):
    """Whole, but for those that train: they are left after a few steps."""
    if path.name in HOST_ONLY:
        pytest.skip(HOST_ONLY[path.name])
    if path.name in NEEDS and importlib.util.find_spec(NEEDS[path.name]) is None:
        pytest.skip(f"{NEEDS[path.name]} is not installed")
    options = ["--device", "cuda"] + ["--quick"] * ("--quick" in path.read_text(encoding="utf-8"))
    env = runs.environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    subprocess.run([sys.executable, "-c", ON_STAND_IN, str(path), *options], check=True, cwd=tmp_path, env=env, timeout=300)
