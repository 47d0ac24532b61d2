"""The real thing: a small decoder, its KV cache, the batched decode loop, and honest timing.

Torch and numpy only. Nothing here draws, predicts on paper or schedules requests: `explain`,
`predict` and `serve` do. Bytes, seconds, FLOP/s and tokens throughout; GB = 10^9.
"""

from .calibrate import Calibration, calibrate, measure_linear
from .ceiling import (
    Ceiling,
    Exhaustion,
    KVPool,
    PoolExhaustedError,
    find_ceiling,
    run_to_exhaustion,
)
from .decode import Step, decode
from .device import pick_device, pick_dtype
from .kv_cache import KVCache
from .memory import NotEnoughMemoryError, Outcome, allocated_bytes, attempt, release_memory
from .model import Decoder, random_tensors, weight_reads
from .model_runner import ModelRunner
from .paged import PagedCache
from .pretrained import load_pretrained, save_pretrained, smollm2
from .step_model import StepTimeModel
from .steps import StepTiming, contradiction, measure_prefill, measure_step, measure_steps
from .timing import Timing, timed
from .tokenizer import Tokenizer

__all__ = [
    "Calibration",
    "Ceiling",
    "Decoder",
    "Exhaustion",
    "KVCache",
    "KVPool",
    "ModelRunner",
    "NotEnoughMemoryError",
    "Outcome",
    "PagedCache",
    "PoolExhaustedError",
    "Step",
    "StepTimeModel",
    "StepTiming",
    "Timing",
    "Tokenizer",
    "allocated_bytes",
    "attempt",
    "calibrate",
    "contradiction",
    "decode",
    "find_ceiling",
    "load_pretrained",
    "measure_linear",
    "measure_prefill",
    "measure_step",
    "measure_steps",
    "pick_device",
    "pick_dtype",
    "random_tensors",
    "release_memory",
    "run_to_exhaustion",
    "save_pretrained",
    "smollm2",
    "timed",
    "weight_reads",
]
