"""Two readings of /metrics, and what happened between them."""

import math

import pytest
from decodelab.serve import scrape

PAGE = """\
# HELP vllm:num_requests_running Requests in the batch.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# HELP vllm:request_success_total Requests that ended.
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {stopped}
vllm:request_success_total{{engine="1",finished_reason="stop",model_name="m"}} 1.0
vllm:request_success_total{{engine="0",finished_reason="abort",model_name="m"}} 2.0
# TYPE vllm:request_success_created gauge
vllm:request_success_created{{engine="0",finished_reason="abort",model_name="m"}} 1.7e+09
# HELP vllm:request_queue_time_seconds Time in the queue.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{{engine="0",le="0.3",model_name="m"}} {fast}
vllm:request_queue_time_seconds_bucket{{engine="0",le="0.5",model_name="m"}} {most}
vllm:request_queue_time_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {all}
vllm:request_queue_time_seconds_count{{engine="0",model_name="m"}} {all}
vllm:request_queue_time_seconds_sum{{engine="0",model_name="m"}} {sum}
"""
BEFORE = {"running": 2, "stopped": 3, "fast": 4, "most": 5, "all": 6, "sum": 10.0}
AFTER = {"running": 5, "stopped": 9, "fast": 9, "most": 14, "all": 16, "sum": 14.0}
QUEUE = scrape.STAGES["queue"]


def page(values):
    return scrape.parse(PAGE.format(**values))


@pytest.fixture(scope="module")
def growth():
    return scrape.difference(page(BEFORE), page(AFTER))


def test_gauges_are_now_and_counters_are_since_the_start():
    found = page(BEFORE)
    assert found.gauges == {"vllm:num_requests_running": 2.0}  # and no date
    assert found.counters['vllm:request_success_total{finished_reason="abort"}'] == 2.0
    assert found.counters[f"{QUEUE}_sum"] == 10.0


def test_values_that_differ_in_the_engine_alone_are_added_up():
    assert page(BEFORE).counters['vllm:request_success_total{finished_reason="stop"}'] == 4.0


def test_a_difference_is_the_growth_of_each_counter(growth):
    assert growth['vllm:request_success_total{finished_reason="stop"}'] == 6.0
    assert growth['vllm:request_success_total{finished_reason="abort"}'] == 0.0
    assert "vllm:num_requests_running" not in growth


def test_a_mean_is_of_the_requests_between_the_two(growth):
    assert scrape.mean(growth, QUEUE) == pytest.approx(0.4)  # not 14 / 16, since the start
    assert math.isnan(scrape.mean(growth, "vllm:no_such_thing"))
    assert math.isnan(scrape.mean(scrape.difference(page(AFTER), page(AFTER)), QUEUE))


def test_a_percentile_is_the_bound_of_its_bucket(growth):
    # Of ten, five are at most 0.3 s, and nine at most 0.5 s.
    assert scrape.quantile(growth, QUEUE, 50) == 0.3
    assert scrape.quantile(growth, QUEUE, 51) == 0.5
    assert scrape.quantile(growth, QUEUE, 90) == 0.5
    assert scrape.quantile(growth, QUEUE, 99) == math.inf
    assert math.isnan(scrape.quantile(growth, "vllm:no_such_thing", 50))


def test_a_counter_that_fell_began_anew():
    again = scrape.difference(page(AFTER), page(BEFORE))
    assert again[f"{QUEUE}_sum"] == 10.0
    assert again[f"{QUEUE}_count"] == 6.0


def test_an_empty_page_counts_nothing_and_another_page_is_refused():
    assert scrape.parse("").counters == {}
    with pytest.raises(ValueError):  # noqa: PT011, the parser's own words
        scrape.parse("<html>not found</html>")


def test_where_nobody_answers_there_is_no_page():
    assert scrape.fetch("http://127.0.0.1:9") == ""
