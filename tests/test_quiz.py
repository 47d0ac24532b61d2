"""Quizzes answer at once, never raise on an answer, and never name the right option."""

import json
from pathlib import Path

import pytest
from decodelab.explain.quiz import Quiz, QuizError, check, seal

LESSON = "lesson1_toy"
FEEDBACK = {
    "q1": {"A": "Weights are not read per request.", "B": "One reading serves all of them."},
    "q2": {"A": "Yes: 2B/p.", "B": "That forgets p.", "C": "That forgets the batch, B, entirely."},
}
RIGHT = {"q1": "B", "q2": "A"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sealed = json.dumps(seal(LESSON, FEEDBACK, RIGHT))
    (tmp_path / f"{LESSON}.json").write_text(sealed, encoding="utf-8")
    return tmp_path


@pytest.fixture
def quiz(folder: Path) -> Quiz:
    return Quiz("lesson1", folder)


def test_the_right_option_is_confirmed_with_its_reason(quiz: Quiz) -> None:
    verdict = quiz.verdict("q1", "B")
    assert (verdict.state, verdict.text) == ("right", FEEDBACK["q1"]["B"])


@pytest.mark.parametrize(("question", "answer"), [("q1", "A"), ("q2", "B"), ("q2", "C")])
def test_a_wrong_option_names_its_own_misconception_and_nothing_else(
    quiz: Quiz, question: str, answer: str
) -> None:
    verdict = quiz.verdict(question, answer)
    assert (verdict.state, verdict.text) == ("wrong", FEEDBACK[question][answer])
    shown = str(verdict) + verdict._repr_html_()
    assert FEEDBACK[question][RIGHT[question]] not in shown


@pytest.mark.parametrize("answer", ["?", None, ...])
def test_no_answer_asks_to_choose(quiz: Quiz, answer: object) -> None:
    verdict = quiz.verdict("q2", answer)
    assert verdict.state == "unanswered"
    assert "Choose one of A, B, C" in verdict.text


class Odd:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compares with nothing")

    __hash__ = None


@pytest.mark.parametrize("answer", ["E", "b", "", 2, ["A"], Odd(), "A" * 1000])
def test_an_unknown_option_gets_a_sentence_and_never_raises(quiz: Quiz, answer: object) -> None:
    verdict = quiz.verdict("q2", answer)
    assert verdict.state == "unknown"
    assert "is not among A, B, C" in verdict.text
    assert len(verdict.text) < 140


def test_check_shows_the_verdict_as_html_with_a_text_alternative(
    quiz: Quiz, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    assert quiz.check("q1", "A") is None
    assert 'role="status"' in shown[0]._repr_html_()
    assert repr(shown[0]) == "\u2717 q1: Not yet. Weights are not read per request."


def test_states_differ_by_word_and_sign_and_not_by_colour_alone(quiz: Quiz) -> None:
    texts = {str(quiz.verdict("q1", answer)).split(":")[0] for answer in ("A", "B", "?", "X")}
    words = {
        quiz.verdict("q1", answer)._repr_html_().split("<strong>")[1].split("<")[0]
        for answer in ("A", "B", "?", "X")
    }
    assert len(texts) == len(words) == 4


def test_html_in_an_answer_is_shown_and_not_obeyed(quiz: Quiz) -> None:
    assert "<script>" not in quiz.verdict("q1", "<script>")._repr_html_()


def test_an_unknown_question_or_lesson_says_what_there_is(quiz: Quiz, folder: Path) -> None:
    with pytest.raises(QuizError, match="has no question 'q9'; it has q1, q2"):
        quiz.verdict("q9", "A")
    with pytest.raises(QuizError, match=f"there is feedback for {LESSON}"):
        Quiz("lesson7", folder)
    with pytest.raises(QuizError, match="Is the lesson new\\? Run `make release`"):
        check("q1", "A", lesson="no lesson is called that")


def test_the_stored_file_tells_nothing_of_the_answers() -> None:
    text = json.dumps(seal(LESSON, FEEDBACK, RIGHT))
    other = json.dumps(seal(LESSON, FEEDBACK, {"q1": "A", "q2": "C"}))
    sealed = json.loads(text)["entries"]
    assert not [s for options in FEEDBACK.values() for s in options.values() if s in text]
    assert len({len(entry) for entry in sealed.values()}) == 1, "all entries are of one length"
    assert list(sealed) == sorted(sealed), "the order is the hashes', not the options'"
    assert list(json.loads(other)["entries"]) == list(sealed), "the right letter moves nothing"


def test_the_same_feedback_is_sealed_to_the_same_bytes() -> None:
    assert seal(LESSON, FEEDBACK, RIGHT) == seal(LESSON, FEEDBACK, RIGHT)
    assert seal("another", FEEDBACK, RIGHT)["salt"] != seal(LESSON, FEEDBACK, RIGHT)["salt"]
