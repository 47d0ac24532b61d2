"""The real thing: a small decoder, its KV cache, the batched decode loop, and honest timing.

Torch and numpy only. Nothing here draws, predicts on paper or schedules requests: `explain`,
`predict` and `serve` do. Bytes, seconds, FLOP/s and tokens throughout; GB = 10^9.
"""

from .calibrate import Calibration, calibrate, measure_linear
from .decode import Step, decode
from .device import pick_device, pick_dtype
from .kv_cache import KVCache
from .memory import NotEnoughMemoryError
from .model import Decoder
from .step_model import StepTimeModel
from .steps import StepTiming, measure_prefill, measure_step, measure_steps
from .timing import Timing, timed

__all__ = [
    "Calibration",
    "Decoder",
    "KVCache",
    "NotEnoughMemoryError",
    "Step",
    "StepTimeModel",
    "StepTiming",
    "Timing",
    "calibrate",
    "decode",
    "measure_linear",
    "measure_prefill",
    "measure_step",
    "measure_steps",
    "pick_device",
    "pick_dtype",
    "timed",
]
