"""Lesson 4's lab: what it stores, what a grader replays, and which engine it compares with."""

import json
from dataclasses import replace

import pytest
from decodelab.explain import serving_lesson
from decodelab.explain.lesson import MEASUREMENTS_FILE
from decodelab.explain.serving_lesson import (
    TERMS,
    ServingLesson,
    difference,
    packed,
    recorded_pair,
    unpacked,
)
from decodelab.serve import Request
from decodelab.serve.launch import Endpoint, Program
from decodelab.serve.load_result import LoadResult, Record
from decodelab.serve.scrape import E2E, STAGES

REQUESTS = (Request([1, 2], 3), Request([3], 1))


def loaded(queue: float = 0.1, decode: float = 0.2, **more: object) -> LoadResult:
    """Two requests, one of which failed."""
    times = (0.30004, 0.35004, 0.40004)
    good = Record(
        id=0, due=0.0, sent=0.001, token_times=times, prompt_tokens=2, output_tokens=3,
        status="finished",
    )  # fmt: skip
    bad = replace(
        good, id="b", token_times=(), output_tokens=0, status="refused", error="429: full"
    )
    means = zip(STAGES.values(), (queue, 0.1, decode), strict=True)
    server = {f"{name}_{of}": v for name, s in means for of, v in (("sum", s), ("count", 1.0))}
    server |= {f"{E2E}_sum": 0.4, f"{E2E}_count": 1.0, "vllm:prompt_tokens_total": 2.0}
    fields = {"kind": "open loop", "records": (good, bad), "seconds": 2.0, "cpu_share": 0.1}
    return LoadResult(**fields | {"rate": 1.0, "server": server, "about": {"engine": "x"}} | more)


@pytest.fixture
def lab(tmp_path, monkeypatch) -> ServingLesson:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DECODELAB_OTHER_ENGINE", raising=False)
    return ServingLesson("lesson4_serving_economics", "25M")


def test_a_packed_load_test_is_plain_json_and_comes_back_to_a_tenth_of_a_millisecond():
    result = loaded()
    back = unpacked(json.loads(json.dumps(packed(result), sort_keys=True)))
    good, bad = back.records
    assert good.token_times == pytest.approx(result.records[0].token_times, abs=5.1e-5)
    assert bad == result.records[1]
    assert (back.kind, back.rate, back.seconds) == ("open loop", 1.0, 2.0)
    assert back.terms().keys() == set(TERMS)
    assert back.terms()["queue"] == pytest.approx(0.1)


def test_engines_differ_term_by_term_ours_minus_theirs():
    apart = difference(loaded(queue=0.1, decode=0.2), loaded(queue=0.3, decode=0.15))
    assert apart["queue"] == pytest.approx(-0.2)
    assert apart["decode"] == pytest.approx(0.05)
    assert apart["prefill"] == pytest.approx(0.0)


def test_beside_a_server_without_such_metrics_the_client_tells_two_terms():
    apart = difference(loaded(), replace(loaded(), server={}))
    assert apart == dict.fromkeys(TERMS, 0.0)
    late = replace(loaded().records[0], due=-0.1)
    apart = difference(loaded(), loaded(server={}, records=(late,)))
    assert apart["prefill"] == pytest.approx(-0.1)
    assert apart["decode"] == pytest.approx(0.0)


def test_without_a_server_a_load_says_which_cell_to_run(lab):
    with pytest.raises(ValueError, match="lab.start"):
        lab.load("early", REQUESTS)


def test_an_engine_that_runs_is_taken_first_and_ours_never(lab, monkeypatch, capsys):
    running = Endpoint(url="http://127.0.0.1:1", kind="vllm", version="0.32", model="other")
    ours = replace(running, kind="decodelab")
    monkeypatch.setattr(serving_lesson, "engines", lambda: [ours, running])
    assert lab.rival() == "vllm"
    assert "need not be this lesson's weights" in capsys.readouterr().out
    monkeypatch.setenv("DECODELAB_OTHER_ENGINE", "none")
    assert lab.rival() is None


def test_an_engine_that_cannot_start_is_told_and_the_recorded_run_shown(lab, monkeypatch, capsys):
    broken = Program(kind="transformers", version="5", command=("transformers",))
    monkeypatch.setattr(serving_lesson, "engines", lambda: [broken])

    def stopped(*_: object, **__: object) -> None:
        raise RuntimeError("transformers stopped before it answered: accelerate is missing")

    monkeypatch.setattr(serving_lesson, "launch", stopped)
    assert lab.rival(max_batch=8) is None
    assert "accelerate is missing" in capsys.readouterr().out


def test_without_another_engine_a_recorded_pair_says_that_it_is_one(lab, monkeypatch, capsys):
    monkeypatch.setenv("DECODELAB_OTHER_ENGINE", "none")
    lab.rival()
    ours, theirs = lab.compare("beside", REQUESTS, users=2)
    said = capsys.readouterr().out
    assert "Recorded, not measured here" in said
    assert theirs.about["date"] in said
    assert ours.about["engine"] == "decodelab"
    assert theirs.about["engine"] != "decodelab"


def test_a_grader_replays_every_load_and_starts_nothing(tmp_path, monkeypatch):
    stored = {
        "alone": packed(loaded()),
        "other engine": {"kind": "vllm", "version": "0.32"},
        **{f"beside, {whose} {turn}": packed(loaded(seconds=s))
           for whose, turns in (("ours", (3.0, 2.0)), ("theirs", (4.0, 5.0)))
           for turn, s in enumerate(turns, 1)},
    }  # fmt: skip
    payloads = {name: {"name": name, "measured": data} for name, data in stored.items()}
    (tmp_path / MEASUREMENTS_FILE).write_text(json.dumps(payloads, sort_keys=True))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    monkeypatch.setattr(serving_lesson, "launch", lambda *_, **__: pytest.fail("a server"))
    lab = ServingLesson("lesson4_serving_economics", "25M")
    with lab.text_server() as url:
        assert url is None
    lab.start(max_batch=8)
    assert lab.load("alone", REQUESTS).seconds == 2.0
    assert lab.rival() == "vllm"
    ours, theirs = lab.compare("beside", REQUESTS, users=2)
    assert (ours.seconds, theirs.seconds) == (2.0, 4.0), "the faster of each two counts"


def test_the_recorded_pair_served_the_same_requests():
    ours, theirs = recorded_pair()
    assert [r.output_tokens for r in ours.records] == [r.output_tokens for r in theirs.records]
    assert not ours.unfinished
    assert not theirs.unfinished
    assert set(ours.terms()) == set(theirs.terms()) == set(TERMS)
