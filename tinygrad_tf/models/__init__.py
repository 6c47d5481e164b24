"""Whole models, each a page read from top to bottom, built from the parts in `nn`."""
from .minigpt import MiniGPT
