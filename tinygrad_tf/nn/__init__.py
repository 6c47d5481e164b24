"""Layers and models under PyTorch's names.

Reading order: module (the tree), layers, attention, blocks; containers, init, functional and utils where you meet them.
"""
from . import functional, init, utils
from .attention import MultiheadAttention, MultiHeadAttention
from .blocks import FeedForward, TransformerBlock
from .containers import ModuleDict, ModuleList, ParameterList, Sequential
from .layers import (GELU, CrossEntropyLoss, Dropout, Embedding, Flatten, Identity, LayerNorm, LeakyReLU, Linear, LogSoftmax, MSELoss,
                     NLLLoss, ReLU, RMSNorm, Sigmoid, SiLU, Softmax, Tanh)
from .module import Module, Parameter
