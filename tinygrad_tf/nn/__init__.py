"""Layers and models under PyTorch's names.

Reading order: module (the tree), layers, activations, losses, attention, positions, blocks, moe; containers, init, functional
and utils where you meet them.
"""
from ..arguments import absent
from . import functional, init, masks, utils
from .activations import GELU, GLU, LeakyReLU, LogSoftmax, ReLU, ReLUSquared, Sigmoid, SiLU, Softmax, Tanh
from .attention import MultiHeadAttention, MultiheadAttention
from .blocks import FeedForward, TransformerBlock
from .containers import ModuleDict, ModuleList, ParameterList, Sequential
from .feedforward import GEGLU, GatedFeedForward, SwiGLU
from .layers import Dropout, Embedding, Flatten, Identity, LayerNorm, Linear, RMSNorm
from .losses import BCEWithLogitsLoss, CrossEntropyLoss, MSELoss, NLLLoss
from .module import Module, Parameter
from .moe import DenseMoE, MoE
from .positions import (
    ALiBi,
    InputEmbedding,
    LearnedPositions,
    RotaryEmbedding,
    SinusoidalPositionEncoding,
    T5RelativeBias,
    alibi_slopes,
    half_split_to_interleaved,
    interleaved_to_half_split,
)

__getattr__ = absent(__name__)
