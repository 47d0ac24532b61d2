"""What the server says of itself at /metrics, under the names and with the buckets of vLLM 0.32.

Seconds are wall time: queue + prefill + decode = end to end, request by request.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from .allocator import SharingAllocator
from .async_engine import AsyncEngine
from .token_stream import Ticket
from .trace import StepRecord

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
           7680)  # fmt: skip
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
        40, 80, 160, 640, 2560)  # fmt: skip
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
       80)  # fmt: skip
STEP_TOKENS = tuple(2**power for power in (0, *range(3, 15)))
REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
FINISHED_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "abort": "abort",
                    "error": "error"}  # fmt: skip


class Metrics:
    """Counts what an AsyncEngine does, as its observer; `model` is the label model_name."""

    def __init__(self, model: str) -> None:
        self.registry, self.sharing = CollectorRegistry(), False
        self._labels = {"model_name": model, "engine": "0"}
        ProcessCollector(registry=self.registry)
        counter, histogram = partial(self._metric, Counter), partial(self._metric, Histogram)
        self.preemptions = counter("num_preemptions", "Preemptions.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were prefilled.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self.hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        for reason in FINISHED_REASONS.values():
            self.success.labels(**self._labels, finished_reason=reason)
        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests that found the queue full.",
            ["model_name", "reason"],
            registry=self.registry,
        ).labels(model_name=model, reason="max_num_queued_reqs")
        self.step_tokens = histogram("iteration_tokens_total", "Tokens of a step.", STEP_TOKENS)
        self.ttft = histogram("time_to_first_token_seconds", "Time to first token.", TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Time between two tokens.", ITL)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Time per token after the first.", ITL
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue = histogram("request_queue_time_seconds", "From arrival to the first step.")
        self.inference = histogram("request_inference_time_seconds", "From there to the end.")
        self.prefill = histogram("request_prefill_time_seconds", "First step to first token.")
        self.decode = histogram("request_decode_time_seconds", "First token to last.")
        self.prompts = histogram("request_prompt_tokens", "Tokens of a prompt.", REQUEST_TOKENS)
        self.outputs = histogram(
            "request_generation_tokens", "Tokens of an output.", REQUEST_TOKENS
        )
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens.", REQUEST_TOKENS)
        self.request_preemptions = histogram(
            "request_num_preemptions", "Preemptions of a request.", PREEMPTIONS
        )

    def _metric(self, kind: type, name: str, text: str, buckets: tuple[float, ...] | None = None):
        options = {"buckets": buckets or LATENCY} if kind is Histogram else {}
        metric = kind(f"vllm:{name}", text, list(self._labels), registry=self.registry, **options)
        return metric.labels(**self._labels)

    def watch(self, engine: AsyncEngine) -> None:
        """Read the gauges from this engine, whenever they are asked for."""
        scheduler = engine.engine.scheduler
        pool = scheduler.allocator
        gauge = partial(self._metric, Gauge)
        gauge("num_requests_running", "Requests in the batch.").set_function(
            lambda: len(scheduler.running)
        )
        gauge("num_requests_waiting", "Requests in the queue.").set_function(lambda: engine.waiting)
        gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.").set_function(
            lambda: 1 - pool.free_blocks / pool.num_blocks
        )
        self.sharing = isinstance(pool, SharingAllocator)
        about = {
            "block_size": pool.block_size,
            "num_gpu_blocks": pool.num_blocks,
            "enable_prefix_caching": self.sharing,
            "engine": "0",
        }
        Gauge(
            "vllm:cache_config_info", "The KV cache.", list(about), registry=self.registry
        ).labels(**about).set(1)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def step(self, record: StepRecord) -> None:
        """Count a step's tokens and preemptions."""
        self.step_tokens.observe(record.prompt_tokens + record.decode_tokens)
        self.generation_tokens.inc(len(record.emitted))
        if record.preempted:
            self.preemptions.inc(len(record.preempted))

    def token(self, ticket: Ticket, now: float) -> None:
        """Time a token; the first one says that its prompt is done."""
        if ticket.last is not None:
            self.itl.observe(now - ticket.last)
            return
        self.ttft.observe(now - ticket.submitted)
        self.prompt_tokens.inc(len(ticket.request.prompt))
        if self.sharing:
            self.queries.inc(len(ticket.request.prompt))
            self.hits.inc(ticket.cached)

    def end(self, ticket: Ticket) -> None:
        """Count how a request ended, and where the time of one that was served went."""
        reason = FINISHED_REASONS[ticket.finish]
        self.success.labels(**self._labels, finished_reason=reason).inc()
        if reason not in ("stop", "length"):
            return
        tokens, decode = len(ticket.sequence.output), ticket.last - ticket.first
        self.e2e.observe(ticket.last - ticket.submitted)
        self.queue.observe(ticket.started - ticket.submitted)
        self.inference.observe(ticket.last - ticket.started)
        self.prefill.observe(ticket.first - ticket.started)
        self.decode.observe(decode)
        self.tpot.observe(decode / max(1, tokens - 1))
        self.prompts.observe(len(ticket.request.prompt))
        self.outputs.observe(tokens)
        self.max_tokens.observe(ticket.request.max_tokens)
        self.request_preemptions.observe(ticket.sequence.preemptions)
