"""Low-bit weights: fake ones that train, observers that choose a range, quantisation-aware training (guide 11.3)."""
from ..ops.quantize import Scheme, dequantized, fake_quantize, limits, quantized, scale_and_zero
from .awq import awq
from .calibration import InputStatistics
from .gptq import gptq
from .linear import INT4, Codes, QuantizedLinear, round_to_nearest
from .model import bits_per_weight, output_errors, quantize_model, quantized_linears
from .observers import MinMaxObserver, MovingAverageMinMaxObserver, MSEObserver, Observer, PercentileObserver, mse_limits, percentile_limits
from .packing import pack, unpack
from .qat import FakeQuantize, QATEmbedding, QATLinear, convert, prepare_qat
