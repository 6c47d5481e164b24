"""Attention by the CUDA kernels of kernels/flash.py: on the GPU for CuPy arrays, on the emulator for NumPy arrays."""
from ..autograd import Function
from ..kernels import flash


class KernelAttention(Function):
    """out = softmax(scale · q kᵀ, over the keys that a query may see) v;  saves q, k, v, out and lse, never p.  (guide 10.5)

    q: [B, H, Tq, Dh]   k: [B, Hkv, Tk, Dh]   v: [B, Hkv, Tk, Dv]   valid_tokens: None or bool [B, Tk]   out: [B, H, Tq, Dv]

    p = exp(scale · q kᵀ − lse),  ds = p · (dout vᵀ − Σ dout · out),   dq = scale · ds k,  dk = scale · dsᵀ q,  dv = pᵀ dout
    """

    in_float32 = False                          # there is a kernel for bfloat16

    def forward(self, q, k, v, valid_tokens, band, scale):
        out, lse = flash.forward(q, k, v, valid_tokens, band, scale)
        self.saved, self.band, self.scale = (q, k, v, out, lse, valid_tokens), band, scale
        return out

    def backward(self, dout):
        q, k, v, out, lse, valid_tokens = self.saved
        dout = dout.astype(q.dtype, copy=False)
        return flash.backward(q, k, v, out, lse, dout, valid_tokens, self.band, self.scale, needs=self.needs[:3])


def refusal(q, k, v, bias=None, allowed=None, dropout_p=0.0):
    """None where KernelAttention can take these arrays, else the reason, to stand after "because"."""
    if bias is not None:
        return "the kernels know no bias that is added to the scores"
    if allowed is not None:
        return "the kernels know no boolean mask but a band and valid_tokens"
    if dropout_p:
        return "the kernels know no dropout of the weights"
    refused = flash.refusal(q, k, v)
    return refused and refused[1]


def widest_head():
    """The largest head dim of which there is a kernel."""
    return max(max(tier.tiles) for tier in flash.TIERS.values())
