"""A request refuses what makes no sense; a sequence's times follow from its tokens."""

import math

import pytest
from decodelab.serve import Request, Sampling, Sequence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": "Hello"}, "list of token ids, not 'Hello'"),
        ({"prompt": [1.5]}, "list of token ids"),
        ({"prompt": 7}, "list of token ids"),
        ({"max_tokens": 0}, "max_tokens must be a positive whole number, not 0"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"arrival": -1}, "arrival"),
        ({"arrival": math.nan}, "arrival"),
        ({"id": ["a"]}, "hashable"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_a_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Request(**{"prompt": [1, 2], "max_tokens": 3} | change)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("seed", 0.5),
    ],
)
def test_sampling_refuses_what_has_no_meaning(name, value):
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})


def test_a_request_keeps_its_own_prompt_whatever_becomes_of_the_list():
    prompt = [1, 2]
    request = Request(prompt, 3)
    prompt.append(3)
    assert request.prompt == (1, 2)


@pytest.mark.parametrize(("eos", "kept"), [(5, {5}), ([5, 6], {5, 6}), ((), set()), (None, set())])
def test_eos_is_one_id_or_several_or_none(eos, kept):
    assert Request([1], 1, eos=eos).eos == kept


def sequence_with_tokens_at(*times, arrival=0.0):
    sequence = Sequence(Request([1, 2, 3], 10), arrival)
    for time in times:
        sequence.append(9, time)
    return sequence


def test_ttft_counts_from_arrival_and_so_includes_queue_and_prefill():
    assert sequence_with_tokens_at(3.0, 3.5, arrival=1.0).ttft == 2.0


def test_a_first_token_at_time_zero_counts():
    assert sequence_with_tokens_at(0.0, 1.0).ttft == 0.0


def test_tpot_leaves_out_the_first_token_and_itl_keeps_each_gap():
    sequence = sequence_with_tokens_at(3.0, 3.5, 5.0, arrival=1.0)
    assert sequence.e2e == 4.0
    assert sequence.tpot == (4.0 - 2.0) / 2 != sequence.e2e / 3  # TTFT would be in that
    assert sequence.itl == [0.5, 1.5]


def test_times_are_nan_before_there_are_tokens():
    assert math.isnan(sequence_with_tokens_at().ttft)
    assert math.isnan(sequence_with_tokens_at().e2e)
    assert math.isnan(sequence_with_tokens_at(1.0).tpot)
    assert sequence_with_tokens_at(1.0).itl == []


def test_a_sequence_ends_at_its_last_token_or_at_eos():
    by_length, by_eos = Sequence(Request([1], 2)), Sequence(Request([1], 2, eos=7))
    by_length.append(7, 0.0)
    assert by_length.status == "waiting"
    by_length.append(7, 1.0)
    by_eos.append(7, 0.0)
    assert (by_length.status, by_length.reason) == ("finished", "length")
    assert (by_eos.status, by_eos.reason) == ("finished", "eos")
    assert by_eos.output == [7]


def test_the_last_token_is_emitted_and_never_fed_so_it_needs_no_kv():
    assert Sequence(Request([1, 2, 3], 1)).max_length == 3
    assert Sequence(Request([1, 2, 3], 10)).max_length == 12
