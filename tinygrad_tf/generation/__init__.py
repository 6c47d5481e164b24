"""Text from a trained model: caches of keys and values, sampling, and the one generator that all paths share."""
from .batch import Batch, Row, complete
from .beam import Beam, beam_search
from .cache import Cache, ConcatKVCache, KVCache
from .generator import generate, stream
from .greedy import greedy_decode
from .inference import inference
from .paged import PagedKVCache
from .quantized import QuantizedKVCache
from .rolling import RollingKVCache
from .sampling import Sampler, sample
from .speculative import Draft, ModelDraft, NGramDraft, SpeculativeBatch, speculative_generate
from .text import TextStream
