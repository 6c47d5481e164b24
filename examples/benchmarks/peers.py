"""train_step.py's model in four libraries with names of their own, for compare.py: one function of one training step each.

JAX and HIPS/autograd share their code, functions of arrays; JAX compiles it. DeZero and tinygrad have classes. AdamW is written out
where a library has none.
"""
import math
import os

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01             # AdamW's


def weights(np, V, T, B, L, H, C):
    """{name: array}, of the sizes and scales that PyTorch's layers have."""
    rng = np.random.default_rng(0)
    p = {"token": rng.normal(size=(V, C)), "position": rng.normal(size=(T, C)), "norm.w": np.ones(C), "norm.b": np.zeros(C)}
    for i in range(L):
        for name in ("norm1", "norm2"):
            p |= {f"{i}.{name}.w": np.ones(C), f"{i}.{name}.b": np.zeros(C)}
        for name, rows, columns in [(name, C, C) for name in ("q", "k", "v", "out")] + [("up", C, 4 * C), ("down", 4 * C, C)]:
            bound = rows ** -0.5
            p |= {f"{i}.{name}.w": rng.uniform(-bound, bound, (rows, columns)), f"{i}.{name}.b": rng.uniform(-bound, bound, columns)}
    return {name: array.astype(np.float32) for name, array in p.items()}


def batch(np, V, T, B, L, H, C):
    """(inputs, targets), [B, T] each."""
    ids = np.random.default_rng(1).integers(0, V, (B, T + 1))
    return ids[:, :-1], ids[:, 1:]


# --- functions of arrays: `np` is jax.numpy or autograd.numpy ----------------------------------------------------------------

def layer_norm(np, x, w, b):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w + b


def rms_norm(np, x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def softmax(np, x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def gelu(np, x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def silu(np, x):
    return x / (1 + np.exp(-x))


def cross_entropy(np, logits, targets):
    z = logits - np.max(logits, axis=-1, keepdims=True)
    return np.mean(np.log(np.sum(np.exp(z), axis=-1)) - z[np.arange(len(targets)), targets])


def attention(np, q, k, v):
    T, Dh = q.shape[-2:]
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) / math.sqrt(Dh)
    return np.matmul(softmax(np, np.where(np.tri(T, dtype=bool), scores, -np.inf)), v)


def loss(np, p, inputs, targets, V, T, B, L, H, C):
    x = p["token"][inputs.reshape(-1)].reshape(B, T, C) + p["position"]

    def linear(h, name):
        return np.matmul(h, p[name + ".w"]) + p[name + ".b"]

    def norm(h, name):
        return layer_norm(np, h, p[name + ".w"], p[name + ".b"])
    for i in range(L):
        h = norm(x, f"{i}.norm1")
        q, k, v = (np.swapaxes(linear(h, f"{i}.{name}").reshape(B, T, H, C // H), 1, 2) for name in "qkv")
        x = x + linear(np.swapaxes(attention(np, q, k, v), 1, 2).reshape(B, T, C), f"{i}.out")
        x = x + linear(gelu(np, linear(norm(x, f"{i}.norm2"), f"{i}.up")), f"{i}.down")
    return cross_entropy(np, np.matmul(norm(x, "norm"), p["token"].T).reshape(B * T, V), targets.reshape(-1))


def update(np, p, g, m, v, t):
    """The gradients clipped to a norm of 1, then AdamW: new parameters and moments."""
    norm = np.sqrt(sum(np.sum(x * x) for x in g.values()))
    scale = np.minimum(1, 1 / (norm + 1e-6))
    g = {name: x * scale for name, x in g.items()}
    m = {name: BETA1 * m[name] + (1 - BETA1) * x for name, x in g.items()}
    v = {name: BETA2 * v[name] + (1 - BETA2) * x * x for name, x in g.items()}
    rate, root = LR / (1 - BETA1 ** t), (1 - BETA2 ** t) ** 0.5
    return {name: x * (1 - LR * DECAY) - rate * m[name] / (np.sqrt(v[name]) / root + EPS) for name, x in p.items()}, m, v


def stepping(numpy, one, sizes):
    """The function of one step around `one`(state, t, inputs, targets) → (state, loss)."""
    p = weights(numpy, **sizes)
    zeros = {name: numpy.zeros_like(array) for name, array in p.items()}
    state, t, ids = (p, zeros, zeros), 0, batch(numpy, **sizes)

    def step():
        nonlocal state, t
        t += 1
        state, value = one(state, numpy.float32(t), *ids)
        return float(value)
    return step


def autograd(threads, **sizes):
    import autograd.numpy as np
    import numpy
    from autograd import value_and_grad
    value_and_gradient = value_and_grad(lambda p, inputs, targets: loss(np, p, inputs, targets, **sizes))

    def one(state, t, inputs, targets):
        value, g = value_and_gradient(state[0], inputs, targets)
        return update(numpy, state[0], g, *state[1:], t), value
    return stepping(numpy, one, sizes)


def limit_jax(threads):
    """XLA has no setting for its number of threads: the process keeps to as many cores."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def jax(threads, **sizes):
    limit_jax(threads)
    import jax
    import jax.numpy as np
    import numpy

    @jax.jit
    def one(state, t, inputs, targets):
        value, g = jax.value_and_grad(lambda p: loss(np, p, inputs, targets, **sizes))(state[0])
        return update(np, state[0], g, *state[1:], t), value
    return stepping(numpy, one, sizes)


def operations(library, threads, V, T, B, L, H, C):
    """{operation: {"forward": function, "forward + backward": function}} in JAX (compiled) or HIPS/autograd."""
    import numpy
    if library == "jax":
        limit_jax(threads)
        import jax
        import jax.numpy as np
        from jax.scipy.special import erf
        erf_found, ready, compiled = True, jax.block_until_ready, jax.jit

        def both(f, leaves, g):
            return compiled(lambda leaves: jax.vjp(f, *leaves)[1](g))
    else:
        import autograd.numpy as np
        from autograd import make_vjp
        try:
            from autograd.scipy.special import erf
            erf_found = True
        except ImportError:                                 # SciPy is not installed
            erf_found = False
        ready = compiled = lambda x: x

        def both(f, leaves, g):
            return lambda leaves: make_vjp(lambda leaves: f(*leaves), 0)(leaves)[0](g)
    rng = numpy.random.default_rng(0)
    ids, targets = rng.integers(0, V, B * T), rng.integers(0, V, B * T)
    x, wide, heads = (B, T, C), (B, T, 4 * C), (B, H, T, C // H)
    table = {
        "linear": (lambda x, w, b: np.matmul(x, w) + b, x, (C, 4 * C), (4 * C,)),
        "layer_norm": (lambda x, w, b: layer_norm(np, x, w, b), x, (C,), (C,)),
        "rms_norm": (lambda x, w: rms_norm(np, x, w), x, (C,)),
        "softmax": (lambda x: softmax(np, x), (B, H, T, T)),
        "gelu tanh": (lambda x: gelu(np, x), wide),
        "gelu exact": (lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))), wide),
        "silu": (lambda x: silu(np, x), wide),
        "embedding": (lambda table: table[ids], (V, C)),
        "cross_entropy": (lambda logits: cross_entropy(np, logits, targets), (B * T, V)),
        "attention": (lambda q, k, v: attention(np, q, k, v), heads, heads, heads)}
    cases = {}
    for name, (f, *shapes) in table.items():
        if name == "gelu exact" and not erf_found:
            continue
        leaves = tuple(np.array(rng.normal(size=shape).astype(numpy.float32)) for shape in shapes)
        g = np.array(rng.normal(size=numpy.shape(f(*leaves))).astype(numpy.float32))
        forward, backward = compiled(f), both(f, leaves, g)
        cases[name] = {"forward": lambda forward=forward, leaves=leaves: ready(forward(*leaves)),
                       "forward + backward": lambda backward=backward, leaves=leaves: ready(backward(leaves))}
    return cases


# --- DeZero: made for vision and for NumPy 1, and mended here to run at all ----------------------------------------------------

def dezero(threads, V, T, B, L, H, C):
    """Batched products and np.int are added. Constants are float32 arrays: a Python number would turn all into float64."""
    import numpy
    numpy.int = int                                         # noqa: NPY001  it names this alias, which NumPy has dropped
    import dezero.functions as F
    from dezero import Function, Variable
    f32 = numpy.float32

    class BatchedMatMul(Function):
        def forward(self, a, b):
            return a @ b

        def backward(self, g):
            a, b = self.inputs
            last = (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2)
            return batched(g, F.transpose(b, last)), batched(F.transpose(a, last), g)

    def batched(a, b):
        return BatchedMatMul()(a, b)
    sizes = dict(V=V, T=T, B=B, L=L, H=H, C=C)
    p = {name: Variable(array) for name, array in weights(numpy, **sizes).items()}
    inputs, targets = batch(numpy, **sizes)
    hidden = numpy.where(numpy.tri(T, dtype=bool), f32(0), f32(-1e9))

    def linear(x, name):                                    # [N, C]
        return F.matmul(x, p[name + ".w"]) + p[name + ".b"]

    def norm(x, name):
        x = x - F.sum(x, 1, True) * f32(1 / C)
        return x * (F.sum(x * x, 1, True) * f32(1 / C) + f32(1e-5)) ** f32(-0.5) * p[name + ".w"] + p[name + ".b"]

    def gelu(x):
        return x * f32(0.5) * (F.tanh((x + x * x * x * f32(0.044715)) * f32(math.sqrt(2 / math.pi))) + f32(1))

    def block(x, i):
        h = norm(x, f"{i}.norm1")
        q, k, v = (F.transpose(F.reshape(linear(h, f"{i}.{name}"), (B, T, H, C // H)), (0, 2, 1, 3)) for name in "qkv")
        scores = batched(q, F.transpose(k, (0, 1, 3, 2))) * f32((C // H) ** -0.5) + hidden
        a = F.transpose(batched(F.softmax(scores, axis=3), v), (0, 2, 1, 3))
        x = x + linear(F.reshape(a, (B * T, C)), f"{i}.out")
        return x + linear(gelu(linear(norm(x, f"{i}.norm2"), f"{i}.up")), f"{i}.down")

    def one(state, t, inputs, targets):
        for name, array in state[0].items():
            p[name].data = array
            p[name].cleargrad()
        x = F.get_item(p["token"], inputs.reshape(-1)) + F.reshape(F.broadcast_to(p["position"], (B, T, C)), (B * T, C))
        for i in range(L):
            x = block(x, i)
        logits = F.matmul(norm(x, "norm"), p["token"].T)
        z = logits - logits.data.max(1, keepdims=True)
        picked = F.get_item(z, (numpy.arange(B * T), targets.reshape(-1)))
        value = F.sum(F.log(F.sum(F.exp(z), 1)) - picked) * f32(1 / (B * T))
        value.backward()
        g = {name: p[name].grad.data for name in p}
        return update(numpy, state[0], g, *state[1:], t), value.data
    return stepping(numpy, one, sizes)


# --- tinygrad ------------------------------------------------------------------------------------------------------------

def tinygrad(threads, V, T, B, L, H, C):
    """With TinyJit. tinygrad compiles its kernels with clang, and does not start without one."""
    os.environ.update(DEV="CPU", TRAINING="1")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import numpy
    from tinygrad import Tensor, TinyJit
    from tinygrad.nn.optim import AdamW
    sizes = dict(V=V, T=T, B=B, L=L, H=H, C=C)
    p = {name: Tensor(array).realize() for name, array in weights(numpy, **sizes).items()}
    inputs, targets = (Tensor(ids.astype(numpy.int32)).realize() for ids in batch(numpy, **sizes))
    optimizer = AdamW(list(p.values()), lr=LR, b1=BETA1, b2=BETA2, eps=EPS, weight_decay=DECAY)

    def linear(x, name):
        return x.linear(p[name + ".w"], p[name + ".b"])

    def norm(x, name):
        return x.layernorm(eps=1e-5) * p[name + ".w"] + p[name + ".b"]

    Tensor.training = True                                  # an optimizer steps only then: before TRAINING there was this

    @TinyJit
    def one():
        optimizer.zero_grad()
        x = p["token"][inputs] + p["position"]
        for i in range(L):
            h = norm(x, f"{i}.norm1")
            q, k, v = (linear(h, f"{i}.{name}").reshape(B, T, H, C // H).transpose(1, 2) for name in "qkv")
            a = q.scaled_dot_product_attention(k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
            x = x + linear(a, f"{i}.out")
            x = x + linear(linear(norm(x, f"{i}.norm2"), f"{i}.up").gelu(), f"{i}.down")
        value = (norm(x, "norm") @ p["token"].T).reshape(B * T, V).sparse_categorical_crossentropy(targets.reshape(-1)).backward()
        scale = (1 / (sum((w.grad * w.grad).sum() for w in p.values()).sqrt() + 1e-6)).minimum(1)
        for w in p.values():
            w.grad = w.grad * scale
        return value.realize(*optimizer.schedule_step())    # together: alone, it would be that of the new weights
    for _ in range(3):                                      # TinyJit watches two steps, and replays from then on
        one()
    return lambda: float(one().numpy())


STEPS = {"jax": jax, "autograd": autograd, "dezero": dezero, "tinygrad": tinygrad}
