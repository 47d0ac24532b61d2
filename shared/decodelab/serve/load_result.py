"""What a load test found: a record per request, in seconds after the test began, and its figures.

Standard library only: a saved result can be read and drawn anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import metrics, scrape
from .metrics import SLO, Latencies
from .request import Sequence

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """One request as its client saw it. `due`: when it should be sent; `sent`: when it was.

    Latencies count from `due`, so that a client that falls behind can't hide it. `token_times` has
    a time per token, the same for those that came together. `status` is "finished", "refused" (429
    or 503: the server was full), or "failed"; `error` says why.
    """

    id: int | str
    due: float
    sent: float
    token_times: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    status: str
    error: str = ""

    @property
    def arrival(self) -> float:
        """When its user came: the moment from which latencies count."""
        return self.due

    # The engine's own formulas, which need `arrival` and `token_times` alone.
    ttft = Sequence.ttft
    tpot = Sequence.tpot
    itl = Sequence.itl
    e2e = Sequence.e2e


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """One load test. `kind`: "open loop" or "closed loop"; `seconds`: first due to last end.

    `rate`: requests per second offered (open loop; None if all came at once), `concurrency`: users
    (closed loop). `cpu_share`: the client's CPU seconds over wall seconds; at 1 it's the bottleneck
    itself. `server`: by how much each counter of /metrics grew, empty where there's no such page.
    `about`: engine, version, model, url, date, workload, and what the caller adds.
    """

    kind: str
    records: tuple[Record, ...]
    seconds: float
    cpu_share: float
    rate: float | None = None
    concurrency: int | None = None
    server: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def _by_number(self) -> dict[int, Record]:
        return dict(enumerate(self.records))

    @property
    def ttft(self) -> Latencies:
        """Time to the first token, from due: queue, prefill, and the way there and back."""
        return metrics.ttft(self._by_number)

    @property
    def tpot(self) -> Latencies:
        """Time per output token after the first, one sample a request."""
        return metrics.tpot(self._by_number)

    @property
    def itl(self) -> Latencies:
        """Gaps between tokens, of all requests in one pool."""
        return metrics.itl(self._by_number)

    @property
    def e2e(self) -> Latencies:
        """From due to the last token."""
        return metrics.e2e(self._by_number)

    @property
    def lag(self) -> Latencies:
        """How late the client was to send, of all requests."""
        return Latencies(tuple(record.sent - record.due for record in self.records))

    @property
    def unfinished(self) -> list[Record]:
        """Those refused or failed, each with its error."""
        return [record for record in self.records if record.status != "finished"]

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests together."""
        return sum(record.output_tokens for record in self.records) / self.seconds

    @property
    def requests_per_second(self) -> float:
        """Requests finished."""
        return (len(self.records) - len(self.unfinished)) / self.seconds

    def goodput(self, slo: SLO) -> float:
        """Requests per second that meet all of the SLO."""
        return sum(map(slo.met, self.records)) / self.seconds

    def attainment(self, slo: SLO) -> float:
        """The share of all requests that meet all of the SLO; those that failed don't."""
        return sum(map(slo.met, self.records)) / len(self.records)

    def terms(self) -> dict[str, float]:
        """Mean seconds of a request by where it spends them; their sum is the mean of e2e.

        Queue, prefill and decode are the server's own means; "http and client" is what remains.
        Without them there are two terms, as the client sees them: to the first token, and on.
        """
        stages = {name: scrape.mean(self.server, of) for name, of in scrape.STAGES.items()}
        if any(map(math.isnan, stages.values())):
            first = self.ttft.mean
            return {"to first token": first, "after it": self.e2e.mean - first}
        return stages | {"http and client": self.e2e.mean - sum(stages.values())}

    def save(self, path: str | Path) -> Path:
        """Write all of it to one JSON file."""
        path = Path(path)
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> LoadResult:
        """Read what `save` wrote; ValueError says that a file is something else."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            if fields.pop("version") != VERSION:
                raise ValueError("another version")
            records = [r | {"token_times": tuple(r["token_times"])} for r in fields.pop("records")]
            return cls(records=tuple(Record(**record) for record in records), **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no load test of this version: {error!r}.") from None


def knee(results: Iterable[LoadResult], slo: SLO, share: float = 0.9) -> float:
    """The highest offered rate up to which at least `share` of the requests meet the SLO.

    Requests per second; nan if the lowest rate already fails. A rate above one that failed doesn't
    count, whatever luck it had.
    """
    results, best = list(results), math.nan
    if any(result.rate is None for result in results):
        raise ValueError("A knee needs open loops at known rates, as of `sweep`.")
    for result in sorted(results, key=lambda result: result.rate):
        if result.attainment(slo) < share:
            break
        best = result.rate
    return best
