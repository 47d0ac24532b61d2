"""Who runs next: requests, the block allocator, the schedulers and the engine that drives them.

Plain Python over plain data, no tensors: the model is behind a `Runner`. Seconds, tokens and
blocks throughout.
"""

from .allocator import BlockAllocator, ReservingAllocator, SharingAllocator, slot_mapping
from .engine import Engine
from .metrics import (
    SLO,
    Latencies,
    Summary,
    decode_steps,
    percentile,
    steps_from_lengths,
    summarize,
)
from .request import GREEDY, RefusedError, Request, Sampling, Sequence
from .runner import Result, RooflineRunner, Runner, Work
from .scheduler import (
    Chunk,
    ContinuousScheduler,
    DynamicScheduler,
    Plan,
    Scheduler,
    StaticScheduler,
)
from .trace import Row, StepRecord
from .workload import (
    Lengths,
    TraceRow,
    azure,
    azure_trace,
    lognormal,
    make_requests,
    offline,
    one_long_in_eight,
    poisson,
)

__all__ = [
    "GREEDY",
    "SLO",
    "BlockAllocator",
    "Chunk",
    "ContinuousScheduler",
    "DynamicScheduler",
    "Engine",
    "Latencies",
    "Lengths",
    "Plan",
    "RefusedError",
    "Request",
    "ReservingAllocator",
    "Result",
    "RooflineRunner",
    "Row",
    "Runner",
    "Sampling",
    "Scheduler",
    "Sequence",
    "SharingAllocator",
    "StaticScheduler",
    "StepRecord",
    "Summary",
    "TraceRow",
    "Work",
    "azure",
    "azure_trace",
    "decode_steps",
    "lognormal",
    "make_requests",
    "offline",
    "one_long_in_eight",
    "percentile",
    "poisson",
    "slot_mapping",
    "steps_from_lengths",
    "summarize",
]
