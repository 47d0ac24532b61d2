"""Diagnosis drills: two readings of a real server's /metrics, some seconds apart, under load.

What ails the server, if anything does, isn't said here: reading it off is the drill. Recorded by
tests/bench/drills.py.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from math import isinf, isnan
from pathlib import Path

from IPython.display import display

from decodelab.explain.style import say
from decodelab.serve import scrape

FOLDER = Path(__file__).parent / "recorded" / "drills"
ENDED = 'vllm:request_success_total{{finished_reason="{}"}}'
RATES = {  # what, and the counters that say it
    "requests finished": (ENDED.format("stop"), ENDED.format("length")),
    "requests aborted": (ENDED.format("abort"),),
    "requests refused, queue full": ("vllm:admission_rejections_total",),
    "tokens of prompts": ("vllm:prompt_tokens_total",),
    "tokens generated": ("vllm:generation_tokens_total",),
    "preemptions": ("vllm:num_preemptions_total",),
}
SECONDS = {  # what, and the histogram that says it
    "in the queue, s": "vllm:request_queue_time_seconds",
    "prefill, s": "vllm:request_prefill_time_seconds",
    "decode, s": "vllm:request_decode_time_seconds",
    "end to end, s": "vllm:e2e_request_latency_seconds",
}
TAILS = {  # likewise; its buckets are fine enough for percentiles
    "time to first token, s": "vllm:time_to_first_token_seconds",
    "gap between two tokens, s": "vllm:inter_token_latency_seconds",
    "tokens of a step": "vllm:iteration_tokens_total",
}
CELL = "text-align:left;font-weight:normal;padding:1px 16px 1px 0"
HEAD = "text-align:left;font-weight:bold;padding:8px 16px 1px 0"


@dataclass(frozen=True, kw_only=True)
class Drill:
    """Two pages of /metrics, `seconds` apart, and what the `client` of that load counted.

    `about` says engine, version, model, device and date.
    """

    name: str
    about: Mapping[str, str]
    client: str
    seconds: float
    before: str
    after: str

    @cached_property
    def growth(self) -> dict[str, float]:
        """By how much each counter grew."""
        return scrape.difference(scrape.parse(self.before), scrape.parse(self.after))

    def gauges(self) -> list[tuple[str, str, str]]:
        """(what, at first, at last) of what is a state, not a sum."""
        first, last = (scrape.parse(page).gauges for page in (self.before, self.after))
        rows = []
        for what, name, spell in (
            ("requests running", "vllm:num_requests_running", say),
            ("requests waiting", "vllm:num_requests_waiting", say),
            ("KV blocks in use", "vllm:kv_cache_usage_perc", "{:.0%}".format),
        ):
            rows.append((what, *(_known(page.get(name), spell) for page in (first, last))))
        return rows

    def rates(self) -> list[tuple[str, str]]:
        """(what, per second) of the counters, and the share of prompts found in the cache."""
        rows = []
        for what, names in RATES.items():
            grown = [growth for key, growth in self.growth.items() if key.startswith(names)]
            rows.append((what, _known(sum(grown) / self.seconds if grown else None)))
        queries, hits = (
            self.growth.get(f"vllm:prefix_cache_{n}_total") for n in ("queries", "hits")
        )
        found = f"{hits / queries:.0%}" if queries else "nothing looked up"
        return [*rows, ("of the prompts, found in the prefix cache", found)]

    def times(self) -> list[tuple[str, ...]]:
        """(what, mean) of requests that ended in between, (what, mean, p50, p99) of all else."""
        rows = [(what, _say(scrape.mean(self.growth, name))) for what, name in SECONDS.items()]
        for what, name in TAILS.items():
            ends = [scrape.quantile(self.growth, name, percent) for percent in (50, 99)]
            rows.append((what, *map(_say, (scrape.mean(self.growth, name), *ends))))
        return rows

    def __repr__(self) -> str:
        lines = [f"{self.name}. {self.client}"]
        for head, *rows in self._sections():
            lines += [", ".join(head) + ":", *(f"  {what}: {', '.join(v)}" for what, *v in rows)]
        return "\n".join([*lines, self._source()])

    def _repr_html_(self) -> str:
        rows = []
        for head, *body in self._sections():
            rows += [_row(HEAD, *head), *(_row(CELL, *row) for row in body)]
        raw = "\n".join(line for line in self.after.splitlines() if "_bucket{" not in line)
        return (
            f'<p style="max-width:720px"><b>{escape(self.name)}.</b> {escape(self.client)}</p>'
            f"<table>{''.join(rows)}</table>"
            f'<p style="font-size:11px">{escape(self._source())}</p>'
            "<details><summary>The second reading as the server wrote it, without buckets</summary>"
            f'<pre style="max-height:320px;overflow:auto">{escape(raw)}</pre></details>'
        )

    def _sections(self) -> list[list[tuple[str, ...]]]:
        """Rows of the table, a head before each kind."""
        ends = ("p50 up to", "p99 up to")  # as finely as buckets tell
        return [
            [("gauges", "first reading", f"{say(self.seconds)} s later"), *self.gauges()],
            [("counters, between the two", "per second"), *self.rates()],
            [("histograms, between the two", "mean", *ends), *self.times()],
        ]

    def _source(self) -> str:
        return f"Recorded: {', '.join(self.about.values())}."

    def save(self, folder: Path = FOLDER) -> Path:
        """Write it as JSON, a line of a page in a line of the file."""
        fields = asdict(self)
        for page in ("before", "after"):
            fields[page] = fields[page].splitlines()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(fields, indent=0) + "\n", encoding="utf-8")
        return path


def names() -> list[str]:
    """What `load` and `show` take."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str, folder: Path = FOLDER) -> Drill:
    """One drill; ValueError lists their names."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise ValueError(f"No drill {name!r}. Drills: {', '.join(names())}.")
    fields = json.loads(path.read_text(encoding="utf-8"))
    pages = {page: "\n".join(fields[page]) + "\n" for page in ("before", "after")}
    return Drill(**fields | pages)


def show(name: str) -> None:
    """Show a drill as a table, and the raw page behind it."""
    display(load(name))


def _row(style: str, what: str, *values: str) -> str:
    cells = "".join(f'<td style="{style}">{escape(value)}</td>' for value in values)
    return f'<tr><th scope="row" style="{style}">{escape(what)}</th>{cells}</tr>'


def _known(value: float | None, spell: Callable[[float], str] = say) -> str:
    return "not reported" if value is None else spell(value)


def _say(value: float) -> str:
    if isinf(value):
        return "beyond the last bucket"
    return "none" if isnan(value) else say(value)
