"""Read a server's /metrics, the Prometheus text that says what happened inside, and compare two.

Names are vLLM's, which this course's server uses too.
"""

from __future__ import annotations

import http.client
import math
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

STAGES = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}
E2E = "vllm:e2e_request_latency_seconds"
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # as the load test does
COMMON = ("engine", "model_name")  # labels that say who was asked, not what happened


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """One reading: values by name, as in `vllm:request_success_total{finished_reason="abort"}`.

    Labels of one server and model are left out; values that differ in these alone are added up.
    `gauges` are what is now; `counters` only grow, a histogram's _sum, _count and _bucket included.
    """

    gauges: Mapping[str, float]
    counters: Mapping[str, float]


def parse(text: str) -> Scrape:
    """The text of one /metrics page; ValueError if it's none."""
    from prometheus_client.parser import text_string_to_metric_families

    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        values = gauges if family.type == "gauge" else counters
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue  # a date
            labels = (f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k not in COMMON)
            labels = ",".join(labels)
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            values[name] = values.get(name, 0.0) + sample.value
    return Scrape(gauges=gauges, counters=counters)


def fetch(url: str, timeout: float = 5.0) -> str:
    """The text of `url`/metrics; nothing where there's no such page, or nobody answers."""
    try:
        with _open(f"{url.rstrip('/')}/metrics", timeout=timeout) as answer:
            return answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""


def difference(before: Scrape, after: Scrape) -> dict[str, float]:
    """How much each counter grew; one that fell began anew at 0, as after a restart."""
    growth = {}
    for name, value in after.counters.items():
        earlier = before.counters.get(name, 0.0)
        growth[name] = value - earlier if value >= earlier else value
    return growth


def mean(growth: Mapping[str, float], name: str) -> float:
    """A histogram's mean between two readings, as in `mean(growth, STAGES["queue"])`; or nan."""
    count = growth.get(f"{name}_count", 0)
    return growth[f"{name}_sum"] / count if count else math.nan


def quantile(growth: Mapping[str, float], name: str, percent: float) -> float:
    """A histogram's percentile between two readings: the bound of its bucket, no finer; or nan."""
    start = f'{name}_bucket{{le="'
    buckets = sorted(
        (float(key.removeprefix(start).removesuffix('"}')), count)
        for key, count in growth.items()
        if key.startswith(start)
    )
    wanted = growth.get(f"{name}_count", 0) * percent / 100
    return next((bound for bound, count in buckets if 0 < wanted <= count), math.nan)
