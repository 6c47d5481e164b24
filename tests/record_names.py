"""The names of PyTorch that the guide's code uses, and those recommended beyond, each with a call; PyTorch's answers to the calls.

Run with PyTorch 2.13 installed to record them in tests/data/names.json.gz. How a case is written: tensorcases.py. `F`, `nn`, `optim` and
`math` are there too, and a case that draws random numbers starts from seed 0.
"""
import gzip
import importlib
import json
from pathlib import Path

import tensorcases

DATA = Path(__file__).with_name("data") / "names.json.gz"

# --- names reached by attribute ---------------------------------------------------------------------------------------

NAMES = [f"{room}{'.' if room else ''}{name}" for room, names in {
    "": """
        Tensor Size inf nan pi e newaxis bool long int short half float double float16 float32 float64 int8
        int16 int32 int64 uint8 dtype device Generator randn rand randint randperm bernoulli tensor as_tensor
        from_numpy arange linspace eye zeros ones full empty zeros_like ones_like full_like empty_like rand_like
        randn_like exp sin cos tanh rsqrt sqrt round clamp outer softmax log_softmax logsumexp topk multinomial
        cat concat stack triu tril isfinite isnan isinf allclose isclose equal manual_seed initial_seed
        get_rng_state set_rng_state no_grad enable_grad set_grad_enabled is_grad_enabled argmax argmin max min
        amax amin sort argsort where einsum bmm matmul mm mv dot norm numel clone split chunk unbind permute
        transpose reshape flatten squeeze unsqueeze cumsum gather scatter scatter_add index_add index_select
        masked_fill std var mean sum prod any all abs neg pow sign floor ceil trunc maximum minimum lerp addcmul
        addcdiv flip roll tile repeat_interleave meshgrid diagonal movedim moveaxis swapaxes unique bincount
        nonzero is_tensor is_floating_point result_type promote_types can_cast finfo iinfo get_default_dtype
        set_default_dtype save load true_divide fake_quantize_per_tensor_affine
        fake_quantize_per_channel_affine""",
    "nn": """
        Module Parameter Linear Embedding LayerNorm RMSNorm Dropout GELU ReLU SiLU Tanh Sigmoid Softmax
        Sequential ModuleList ModuleDict Identity Flatten MultiheadAttention CrossEntropyLoss MSELoss NLLLoss
        functional init utils""",
    "nn.functional": """
        scaled_dot_product_attention cross_entropy silu normalize gelu relu softmax log_softmax layer_norm
        rms_norm dropout embedding linear one_hot pad mse_loss nll_loss sigmoid tanh softplus leaky_relu
        binary_cross_entropy_with_logits glu""",
    "nn.init": """
        normal_ zeros_ ones_ constant_ uniform_ eye_ trunc_normal_ xavier_normal_ xavier_uniform_
        kaiming_normal_ kaiming_uniform_""",
    "nn.utils": """
        clip_grad_norm_ clip_grad_value_""",
    "optim": """
        Optimizer SGD Adam AdamW lr_scheduler""",
    "optim.lr_scheduler": """
        LambdaLR LRScheduler CosineAnnealingLR""",
    "Tensor": """
        shape dtype device size reshape transpose flatten unsqueeze squeeze expand repeat_interleave triu tril
        masked_fill masked_fill_ scatter scatter_ gather index_add index_add_ index_select abs amax amin sum
        mean any all cumsum pow clamp clamp_min clamp_max sin cos topk float double half long int bool to detach
        item backward requires_grad requires_grad_ grad grad_fn is_leaf retain_grad register_hook softmax
        log_softmax argmax argmin max min sort argsort where view view_as permute contiguous is_contiguous norm
        numel clone split chunk unbind std var multinomial allclose equal matmul bmm mm T mT numpy tolist cpu
        cuda type type_as stride dim ndim add_ sub_ mul_ div_ copy_ fill_ zero_ normal_ uniform_ bernoulli_
        exponential_ random_ data repeat tile flip roll nonzero unique diagonal movedim swapaxes outer dot prod
        sign floor ceil round exp log sqrt rsqrt tanh sigmoid relu square reciprocal new_zeros new_ones new_full
        new_tensor __getitem__ __setitem__ __len__ __iter__ __bool__ __float__ __int__ __index__""",
    "nn.Module": """
        __call__ parameters named_parameters buffers named_buffers modules named_modules children named_children
        apply train eval register_buffer register_parameter add_module state_dict load_state_dict zero_grad to
        requires_grad_ float double half cpu cuda extra_repr register_forward_hook register_forward_pre_hook
        get_submodule get_parameter""",
}.items() for name in names.split()]

# --- calls with PyTorch's answer --------------------------------------------------------------------------------------

GUIDE = """
torch.inf; r = -torch.inf
x.shape[-2:]; r = list(x.shape[-2:])
B, T = x.shape; r = (B, T, x.shape == (2, 3), x.size(-1), str(x.shape))
x.dtype == torch.float32
str(torch.zeros(2, 2, dtype=torch.bool).dtype)
torch.zeros(2, 3)
torch.zeros((2, 3), dtype=torch.bool)
torch.ones(3, 3, device=x.device, dtype=torch.bool)
torch.full((2, 3), 1, dtype=torch.long)
torch.full_like(x, -torch.inf)
torch.ones_like(x)
torch.arange(4, device=x.device)
torch.arange(0, 8, 2)
torch.arange(2, 5)
torch.tensor([2.0, 1.0]); r = torch.tensor([[1, 2], [3, 4]])
torch.exp(x), torch.sin(x), torch.cos(x), torch.tanh(x), torch.rsqrt(x.abs() + 1)
torch.round(torch.tensor([0.5, 1.5, 2.5, -0.5]))
torch.clamp(x, -1, 1)
torch.outer(torch.arange(3), torch.tensor([0.5, 2.0]))
torch.softmax(x, dim=-1)
torch.topk(x, 2, dim=-1)
x.topk(2, dim=-1).values
torch.cat([x, x], dim=1)
torch.stack((x, x), dim=-1).flatten(-2)
torch.triu(torch.ones(3, 3, dtype=torch.bool), diagonal=1)
torch.ones(3, 3, dtype=torch.bool).triu(1); r = torch.ones(3, 3, dtype=torch.bool).triu(diagonal=1)
torch.isfinite(x).all()
torch.allclose(x, x + 1e-9); r = torch.allclose(x, x + 1e-4, atol=1e-3)
c = torch.no_grad(); c.__enter__(); r = (x * 2).requires_grad; c.__exit__(None, None, None)
c = torch.enable_grad(); c.__enter__(); r = (x * 2).requires_grad; c.__exit__(None, None, None)
x.reshape(3, 2), x.reshape(-1, 2), x.reshape(-1)
x.transpose(0, 1).unsqueeze(1).squeeze(-1)
x[:, :1].expand(2, 3)
x.repeat_interleave(2, dim=1)
x[None, None].masked_fill(torch.ones(2, 3, dtype=torch.bool).triu(1), -torch.inf)
torch.arange(6).reshape(2, 3).masked_fill(torch.tensor([[True], [False]]), -100)
a = torch.zeros(2, 4); a.scatter_(-1, torch.tensor([[1, 0, 3], [0, 1, 2]]), x.detach()); r = a
x.abs(), torch.arange(-2, 2).abs()
x.amax(), x.amax(dim=-1), x.amax(dim=-1, keepdim=True), torch.arange(4).amax()
x.sum(-1), x.sum(dim=0, keepdim=True), x.mean(dim=-1, keepdim=True)
(x > 0).any(), (x > 0).any(dim=-1, keepdim=True), (x > 0).sum()
torch.ones(2, 3, dtype=torch.long).cumsum(dim=-1)
x.pow(2), torch.arange(-2, 2).clamp_min(0), x.sum().clamp_min(1e-3)
x.float(), x.long(), x.to(device=x.device, dtype=torch.float64), x.to(torch.int64)
x.detach().requires_grad, x.sum().item(), float(x.sum())
bool((x == x).all())
x + 1, 1 - x, x * y, x / 2, x ** 2, x @ y.transpose(0, 1), -x
~(x > 0) & (y > 0)
x == y, x != y, x <= y, x >= y
1.0 / (x.abs() + 1), 10000 ** x, 3 - torch.arange(3)
x * (x > 0)
torch.arange(3) * 0.5, torch.arange(3) / 4, (torch.arange(3) * 0.5).dtype
x * 1e-300, x * np.float64(2)
x[:, None], x[None, :], x[:, :-1], x[:, 1:], x[:, -1, None]
x[..., 0::2], x[..., 1], x[..., 1, None]
x[:, None, None, :][:, :, 0, :]
x[torch.tensor([0, 1]), torch.tensor([2, 0])]
a = torch.zeros(2, 4); a[:, 0::2] = 1; a[0, :1] = 5; r = a
a = torch.zeros(2, 4, dtype=torch.bool); a[0, :3] = True; r = a
a = torch.zeros(2, 3); a[:, 0:3:2] = x[:, :2]; r = a
torch.tensor(3.0).shape == torch.Size([]); r = str(torch.tensor(3.0).shape)
F.scaled_dot_product_attention(x[None], y[None], x[None], is_causal=True)
F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None], attn_mask=None, dropout_p=0.0, \
is_causal=True)
F.scaled_dot_product_attention(x[None], y[None], x[None], attn_mask=torch.tensor([[True, False], [True, True]]), \
scale=0.5)
F.scaled_dot_product_attention(x.expand(4, 2, 3), y.expand(2, 2, 3), x.expand(2, 2, 3), enable_gqa=True)
F.cross_entropy(x, torch.tensor([2, -100]))
F.silu(x), F.normalize(x, dim=-1)
nn.functional.silu(x)
l = nn.Linear(3, 2, bias=False); r = (l.bias is None, l.weight, l(x))
l = nn.Linear(3, 2); r = (l.weight, l.bias, l(x))
e = nn.Embedding(4, 3); r = (e.weight, e(torch.tensor([[1, 3]])))
nn.LayerNorm(3)(x), nn.GELU()(x), nn.Dropout(0.0)(x)
nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))(x)
[i for i, m in enumerate(nn.ModuleList([nn.GELU(), nn.GELU()]))][-1]
w = torch.zeros(2, 2); nn.init.normal_(w, mean=1.0, std=0.5); nn.init.zeros_(w[0]); r = w
p = nn.Parameter(torch.ones(3)); (p * 3).sum().backward(); n = nn.utils.clip_grad_norm_([p], max_norm=1.0); r = (n, \
p.grad)
p = nn.Parameter(torch.ones(3)); (p * 3).sum().backward(); r = nn.utils.clip_grad_norm_([p], 1.0).shape == ()
p = nn.Parameter(torch.ones(3)); o = optim.AdamW([p], lr=0.1); (p * 3).sum().backward(); o.step(); \
o.zero_grad(set_to_none=True); r = (p, p.grad is None)
p = nn.Parameter(torch.ones(3)); o = optim.AdamW([p], lr=0.1, weight_decay=0.5); (p * 3).sum().backward(); \
o.step(); r = p
g = optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-3).defaults; r = (g['weight_decay'], *g['betas'], g['eps'])
o = optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0); s = optim.lr_scheduler.LambdaLR(o, \
lr_lambda=lambda i: i + 1); o.step(); s.step(); r = s.get_last_lr()[0]
torch.multinomial(torch.softmax(x.detach(), dim=-1), num_samples=1)
torch.randn(2, 3), torch.randint(0, 9, (2, 3)), torch.randn(2, 3, 4)
str(torch.randint(5, (2,)).dtype)
"""

BEYOND = """
a = torch.randn(2, 3, requires_grad=True); (a * a).sum().backward(); r = a.grad
[n for n, p in nn.Linear(2, 2).named_parameters()] == ['weight', 'bias']
l = nn.Linear(3, 2); m = nn.Linear(3, 2); s = m.load_state_dict(l.state_dict()); \
r = (list(l.state_dict()) == ['weight', 'bias'], m(x))
d = nn.Dropout(0.9).eval(); r = d(x)
a = torch.ones(2).requires_grad_(); r = a.requires_grad
x.softmax(dim=-1), x.softmax(-1), torch.log_softmax(x, dim=-1), x.log_softmax(dim=0)
x.softmax(0, dtype=torch.float64)
x.argmax(), x.argmax(dim=-1), x.argmax(dim=-1, keepdim=True)
x.max(), x.max(dim=-1), x.max(dim=0, keepdim=True).values, torch.max(x, y)
x.sort(dim=-1), x.sort(descending=True).values, torch.sort(x, dim=0).indices, torch.argsort(x, dim=-1, \
descending=True)
torch.sort(x, stable=True, dim=-1)
x.sort(-1, True)
torch.argsort(x, stable=True)
torch.where(x > 0, x, 0.0), torch.where(x > 0, x, y), torch.where(x > 0)
x.tril(), torch.tril(x, -1), torch.tril(torch.ones(3, 3, dtype=torch.bool)), torch.eye(3), torch.eye(2, 3, \
dtype=torch.bool)
x.split(2, dim=-1), x.split([1, 2], -1), torch.split(x, 1), x.chunk(2, dim=1), torch.chunk(x, 2)
torch.split(x, split_size_or_sections=2, dim=1)
torch.einsum('td,sd->ts', x, y), torch.einsum('bhqd,bhkd->bhqk', x[None, None], y[None, None]), \
torch.einsum('...d,d->...', x, y[0])
torch.einsum('ij,ij->', x, y), torch.einsum('ij->ji', x), torch.einsum('i,j', x[0], y[1])
torch.einsum('ij,kj->ik', [x, y])
torch.bmm(x[None], y.T[None]), x[None].bmm(y.T[None])
x.view(3, 2), x.view(-1), x.view((6,)), x.permute(1, 0), x.permute((1, 0)), x.T.contiguous().view(6), \
x.T.is_contiguous()
torch.permute(x, (1, 0)), torch.permute(x, dims=(1, 0)), torch.reshape(x, shape=(3, 2)), torch.flip(x, dims=(0,)), \
x.tile(dims=(2, 1))
x.reshape(shape=(3, 2)), x.T.contiguous().view(size=(6,)), x[0].expand(size=(2, 3)), x.repeat(repeats=(2, 1)), \
x.flip(dims=[1])
x.norm(), torch.norm(x), x.norm(dim=-1), x.norm(p=1, dim=0, keepdim=True), torch.norm(x, p=float('inf'))
x.numel(), torch.numel(x), x.clone(), torch.clone(x), x.nelement()
x.std(), x.std(dim=-1), x.var(dim=-1, unbiased=False), torch.var(x, dim=0, correction=0), x.std(dim=1, keepdim=True)
torch.std(x, -1, True), torch.var(x, 0, False)
x.gather(1, torch.tensor([[0, 2], [1, 1]])), torch.gather(x, dim=-1, index=torch.tensor([[2], [0]]))
a = torch.zeros(2, 3); a.scatter_(1, torch.tensor([[0, 2], [1, 1]]), 1.5); r = a
a = torch.zeros(2, 3); a.scatter_(dim=1, index=torch.tensor([[0], [1]]), value=2.0); r = a
a = torch.zeros(2, 3); a.scatter_add_(0, torch.tensor([[0, 1, 0], [0, 1, 1]]), x.detach()); r = a
torch.scatter(y, 1, torch.tensor([[0], [1]]), x[:, :1])
a = torch.zeros(3, 3); a.index_add_(0, torch.tensor([0, 2]), x.detach()); r = a
x.index_add(0, torch.tensor([1, 1]), y), torch.index_add(x, 0, torch.tensor([0, 1]), y, alpha=2)
torch.multinomial(torch.tensor([0.1, 0.2, 0.7]), 5, replacement=True)
torch.multinomial(torch.tensor([[0.1, 0.0, 0.9], [0.5, 0.5, 0.0]]), 2)
torch.cumsum(x, dim=0), x.cumsum(-1), x.cumsum(dim=1, dtype=torch.float64)
torch.allclose(x, y, rtol=1e3), torch.allclose(torch.tensor([float('nan')]), torch.tensor([float('nan')]), \
equal_nan=True)
F.rms_norm(x, (3,)), F.rms_norm(x, (3,), y[0], 1e-5), nn.RMSNorm(3)(x)
F.gelu(x), F.gelu(x, approximate='tanh'), nn.GELU(approximate='tanh')(x)
F.layer_norm(x, (3,)), F.relu(x), F.softmax(x, dim=-1), F.log_softmax(x, dim=-1), F.one_hot(torch.tensor([0, 2]), 3)
m = nn.MultiheadAttention(4, 2, batch_first=True); a = torch.randn(2, 3, 4); r = m(a, a, a)
m = nn.MultiheadAttention(4, 2); a = torch.randn(3, 2, 4); r = m(a, a, a, attn_mask=torch.ones(3, 3, \
dtype=torch.bool).triu(1), need_weights=False)[0]
p = nn.Parameter(torch.ones(3)); o = optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1); \
(p * 3).sum().backward(); o.step(); o.step(); r = p
p = nn.Parameter(torch.ones(3)); o = optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True); (p * 3).sum().backward(); \
o.step(); o.step(); r = p
p = nn.Parameter(torch.ones(3)); o = optim.Adam([p], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1); \
(p * 3).sum().backward(); o.step(); r = p
torch.linspace(0, 1, 5), torch.arange(0, 1, 0.25), torch.zeros_like(x, dtype=torch.long)
x.sum(axis=0, keepdims=True), torch.sum(x, axis=1), torch.softmax(x, axis=-1), x.max(axis=0).values, torch.cat([x, \
y], axis=1)
x.unsqueeze(axis=0), torch.mean(x, axis=-1), x.argmax(axis=1), torch.stack([x, y], axis=0), torch.cumsum(x, \
axis=0), x.std(axis=0)
x.amax(axis=1), (x > 0).any(axis=0), x.sort(axis=0).values, x.topk(1, axis=1).values, torch.logsumexp(x, axis=0), \
torch.unbind(x, axis=0)
x.sum(axes=0)
x.sum(axis=5)
x.sum(0, axis=1)
torch.add(2, x), torch.pow(2, x), torch.mul(x, 3), torch.sub(x, y, alpha=2), torch.true_divide(x, 2), \
torch.remainder(5, x.detach().abs() + 1)
torch.isin(torch.tensor([1, 2, 3]), torch.tensor([2])), torch.eq(x, y), torch.eq(input=x, other=y), torch.lt(x, 0)
torch.moveaxis(x, 0, 1), torch.swapdims(x, 0, 1)
torch.normal(0.0, 1.0, (3,)), torch.normal(torch.zeros(2), torch.ones(2)), torch.normal(torch.zeros(2), 2.0)
torch.fake_quantize_per_tensor_affine(x, 0.5, 1, -1, 3), torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.3), \
torch.tensor(0, dtype=torch.int32), -8, 7)
torch.fake_quantize_per_channel_affine(x, torch.tensor([0.3, 0.5]), torch.tensor([0, 2], dtype=torch.int32), 0, -2, 3)
torch.fake_quantize_per_channel_affine(x, torch.tensor([0.3, 0.5, 2.0]), torch.tensor([0, 1, 2], dtype=torch.int32), 1, 0, 15)
torch.fake_quantize_per_tensor_affine(x, 0.5, 1, 3, -1)
torch.fake_quantize_per_tensor_affine(x, 0.5, 9, -1, 3)
torch.fake_quantize_per_channel_affine(x, torch.tensor([0.3]), torch.tensor([0], dtype=torch.int32), 0, -2, 3)
s = torch.get_rng_state(); a = torch.rand(3); torch.set_rng_state(s); r = (torch.rand(3) == a, str(s.dtype), \
s.shape == (5056,))
"""

ERRORS = """
torch.sum([1, 2])
torch.softmax([1.0, 2.0], 0)
F.linear(np.ones((2, 3)), x)
F.linear(x, np.ones((2, 3)))
torch.matmul(x, [[1.0]])
torch.exp(2.0)
torch.isfinite(2.0)
torch.add([2], x)
torch.add(x, np.ones(3))
x.add(np.ones(3))
x.masked_fill([True], 0.0)
torch.cat(x)
torch.cat([x, [1]])
torch.stack([1, 2])
torch.einsum('i->i', [1.0])
torch.where([True], x, x)
torch.gather(x, 0, [[0]])
torch.multinomial([0.5, 0.5], 1)
torch.zeros_like([1])
torch.cumsum(x, 7)
torch.eq(x)
torch.sum()
torch.sum(x, dimension=1)
torch.normal([1.0], 1.0)
x.scatter(0, torch.tensor([[0]]), [1.0])
"""

CASES = {tensorcases.name(c): c for text in (GUIDE, BEYOND, ERRORS) for c in tensorcases.each(text, ("f4:2,3", "f4!T:2,3"))}


def answer(library, case):
    """tensorcases.outcome, with the usual short names at hand and the random numbers of seed 0."""
    library.manual_seed(0)
    expression, *recipes = case
    statements = expression if ";" in expression else f"r = ({expression})"
    set_up = "nn, F, optim = torch.nn, torch.nn.functional, torch.optim; "
    return tensorcases.outcome(library, ((set_up + statements).replace("; ", ";"), *recipes))


def recorded():
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        return json.load(file)


def main():
    torch = importlib.import_module("torch")
    missing = [path for path in NAMES if not reached(torch, path)]
    assert not missing, f"PyTorch has no {missing}"
    answers = {name: answer(torch, case) for name, case in CASES.items()}
    DATA.write_bytes(gzip.compress(json.dumps(answers, separators=(",", ":")).encode(), mtime=0))    # the same bytes for the same answers
    for name, case in CASES.items():
        if "error" in answers[name]:
            print(answers[name]["error"], case[0])


def reached(thing, path):
    for name in path.split("."):
        thing = getattr(thing, name, main)
    return thing is not main


if __name__ == "__main__":
    main()
