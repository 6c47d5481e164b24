"""Whole models, each a page read from top to bottom, built from the parts in `nn`."""
from .decoder import Decoder
from .encoder import Encoder, EncoderClassifier
from .encoder_decoder import EncoderDecoder
from .minigpt import MiniGPT
