"""Text from a trained model: the KV cache, sampling, and the loop that streams tokens."""
from .cache import KVCache
from .generator import generate, inference, stream
from .greedy import greedy_decode
from .sampling import sample
