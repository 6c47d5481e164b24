"""Layers and models under PyTorch's names.

Reading order: module (the tree), layers, activations, losses, attention, positions, blocks; containers, init, functional
and utils where you meet them.
"""
from . import functional, init, utils
from .activations import GELU, LeakyReLU, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, Tanh
from .attention import MultiHeadAttention, MultiheadAttention
from .blocks import FeedForward, TransformerBlock
from .containers import ModuleDict, ModuleList, ParameterList, Sequential
from .layers import Dropout, Embedding, Flatten, Identity, LayerNorm, Linear, RMSNorm
from .losses import CrossEntropyLoss, MSELoss, NLLLoss
from .module import Module, Parameter
from .positions import InputEmbedding
