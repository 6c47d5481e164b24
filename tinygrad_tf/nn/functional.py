"""Every operation of a network as a function, under PyTorch's names. They live in `ops/`, and
`attention` in `masked_attention`; this is the list."""
from ..arguments import absent, publish
from ..ops.activation import gelu, glu, leaky_relu, relu, relu_squared, silu, softplus
from ..ops.arithmetic import sigmoid, tanh
from ..ops.dropout import dropout
from ..ops.embedding import embedding, one_hot
from ..ops.linear import linear
from ..ops.loss import binary_cross_entropy_with_logits, cross_entropy, mse_loss, nll_loss
from ..ops.norm import layer_norm, normalize, rms_norm
from ..ops.rotary import rotary
from ..ops.sdpa import flash_attention, scaled_dot_product_attention, sdpa_backend
from ..ops.shape import pad
from ..ops.softmax import log_softmax, softmax
from .masked_attention import attention

publish(globals())
__getattr__ = absent(__name__)
