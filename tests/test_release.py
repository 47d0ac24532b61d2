"""Release lessons: nothing of an answer gets out, the bytes are stable, faults are named."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nb.leaks import leaks
from nb.toy import (
    EXERCISE,
    EXERCISE_TEST,
    FEEDBACK,
    LESSON,
    QUIZ,
    QUIZ_TEST,
    cell,
    toy_lesson,
    with_source,
    without,
)
from nbformat import NotebookNode

from autograder import mutants
from autograder.conventions import ConventionError, check_source
from autograder.project import QUIZZES, ROOT, Project, read_project
from autograder.release import LESSONS, ReleaseError, main, release, start_page, written

REAL = written()


def write_source(root: Path, nb: NotebookNode, lesson: str = LESSON) -> None:
    folder = root / "solutions" / lesson
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, folder / f"{lesson}.ipynb")


def read_released(root: Path, lesson: str = LESSON) -> NotebookNode:
    return nbformat.read(root / "lessons" / lesson / f"{lesson}.ipynb", as_version=4)


@pytest.fixture(scope="module")
def toy_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clone")
    write_source(root, toy_lesson())
    release(root=root)
    return root


def test_there_is_a_lesson_to_release() -> None:
    assert REAL, "solutions/ holds no lesson"
    assert set(REAL) <= {lesson.name for lesson in LESSONS}


@pytest.mark.parametrize("lesson", REAL)
def test_a_lesson_holds_no_answer_anywhere(lesson: str) -> None:
    source = mutants.read_lesson(lesson)[0]
    assert leaks(source, read_released(ROOT, lesson)) == []


@pytest.mark.parametrize("lesson", REAL)
def test_a_dollar_sign_of_prose_is_escaped_lest_two_make_a_formula(lesson: str) -> None:
    texts = (c for c in mutants.read_lesson(lesson)[0].cells if c.cell_type == "markdown")
    prose = {text["id"]: re.sub(r"`[^`]*`", "", text.source) for text in texts}
    assert [id for id, text in prose.items() if len(re.findall(r"(?<!\\)\$", text)) > 1] == []


@pytest.mark.parametrize("lesson", REAL)
def test_the_quiz_file_shows_no_sentence_of_it(lesson: str) -> None:
    text = (ROOT / QUIZZES / f"{lesson}.json").read_text(encoding="utf-8")
    source = mutants.read_lesson(lesson)[0]
    for c in source.cells:
        for sentence in c.metadata.get("decodelab", {}).get("feedback", {}).values():
            assert sentence not in text
            assert json.dumps(sentence)[1:-1] not in text


@pytest.mark.parametrize("lesson", REAL)
def test_every_test_of_a_lesson_tells_right_from_wrong(lesson: str) -> None:
    assert list(mutants.faults(*mutants.read_lesson(lesson))) == []


def test_releasing_the_lessons_again_changes_nothing() -> None:
    assert release(check=True) == []


def test_the_toy_release_holds_no_answer_anywhere(toy_root: Path) -> None:
    assert leaks(toy_lesson(), read_released(toy_root)) == []
    stored = (toy_root / QUIZZES / f"{LESSON}.json").read_text(encoding="utf-8")
    assert not [sentence for sentence in FEEDBACK.values() if sentence in stored]


def test_the_search_for_answers_finds_each_kind_of_them() -> None:
    found = leaks(toy_lesson(), toy_lesson())
    for secret in (
        "bytes_once = ",
        "expected_of_thirty = ",
        FEEDBACK["A"],
        "Because the pool",
        "Most students forget",
        "q1 is answered",
        "my_ms predicts",
        "measure has outputs",
    ):
        assert any(secret in leak for leak in found), secret


def test_the_same_source_gives_the_same_bytes(toy_root: Path, tmp_path: Path) -> None:
    write_source(tmp_path, toy_lesson())
    release(root=tmp_path)
    for path in (
        f"lessons/{LESSON}/{LESSON}.ipynb",
        "lessons/README.md",
        QUIZZES / "toy_lesson.json",
    ):
        assert (tmp_path / path).read_bytes() == (toy_root / path).read_bytes()


def test_released_cells_keep_their_ids_and_run_all_goes_on_past_exercises(toy_root: Path) -> None:
    cells = {c["id"]: c for c in read_released(toy_root).cells}
    assert list(cells) == [c["id"] for c in toy_lesson().cells if c["id"] != "note"]
    going_on = {i for i, c in cells.items() if "raises-exception" in c.metadata.get("tags", [])}
    assert going_on == {"try_it", "weight_bytes_counts_two_bytes_each"}


def test_the_release_names_address_and_version_and_carries_colab_s_settings(toy_root: Path) -> None:
    project, released = read_project(), read_released(toy_root)
    assert f"git+{project.repository}@v{project.version}" in cell(released, "setup").source
    assert project.colab_url(LESSON) in cell(released, "title").source
    assert "{{" not in json.dumps(released).replace('"{{', "")
    assert released.metadata["accelerator"] == "GPU"
    assert released.metadata["colab"]["gpuType"] == "T4"
    assert released.metadata["colab"]["name"] == f"{LESSON}.ipynb"


def test_check_names_the_file_that_differs_and_writes_nothing(tmp_path: Path) -> None:
    write_source(tmp_path, toy_lesson())
    release(root=tmp_path)
    path = tmp_path / "lessons" / LESSON / f"{LESSON}.ipynb"
    path.write_text(path.read_text().replace("two bytes", "three bytes"))
    (path.parent / "left_over.csv").touch()
    edited = path.read_bytes()
    assert release(check=True, root=tmp_path) == [
        f"lessons/{LESSON}/{LESSON}.ipynb differs from what its source gives",
        f"lessons/{LESSON}/left_over.csv comes from no source; delete it",
    ]
    assert path.read_bytes() == edited


def test_a_source_with_a_fault_changes_nothing(tmp_path: Path) -> None:
    write_source(tmp_path, with_source(toy_lesson(), q1=QUIZ.replace('"B"', '"D"', 1)))
    with pytest.raises(ReleaseError, match="answers 'D', which it doesn't offer"):
        release(root=tmp_path)
    assert not (tmp_path / "lessons").exists()


def test_a_lesson_without_source_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["lesson9_nowhere", "--check"]) == 1
    assert "lesson9_nowhere has no source" in capsys.readouterr().err


def test_the_start_page_says_which_lessons_are_not_written_yet() -> None:
    page = start_page(read_project(), ["lesson1_why_batching"])
    link = "[Why batching is everything](lesson1_why_batching/lesson1_why_batching.ipynb)"
    assert link in page
    assert page.count("not written yet") == 3
    assert page.count("colab.research.google.com/github") == 1


def test_an_address_that_colab_can_t_open_is_refused() -> None:
    with pytest.raises(ValueError, match="Colab opens notebooks from https://github.com/ only"):
        Project(repository="https://example.org/a", version="1").colab_url(LESSON)


def retagged(cell_id: str, *names: str) -> NotebookNode:
    nb = toy_lesson()
    cell(nb, cell_id).metadata["tags"] = list(names)
    return nb


def with_feedback(**changes: str) -> NotebookNode:
    nb = toy_lesson()
    cell(nb, "q1").metadata["decodelab"] = {"feedback": {**FEEDBACK, **changes}}
    return nb


def with_nbgrader(cell_id: str, **changes: object) -> NotebookNode:
    nb = toy_lesson()
    cell(nb, cell_id).metadata["nbgrader"] |= changes
    return nb


FAULTS = {
    "two cells have one id": (with_nbgrader("q1", grade_id="why"), "2 cells have the grade_id"),
    "skip tag": (
        retagged("weight_bytes_counts_two_bytes_each", "skip-execution"),
        "has the tag skip-execution; remove it",
    ),
    "unlocked test": (with_nbgrader("q1_is_answered", locked=False), "is not locked"),
    "no points": (with_nbgrader("q1_is_answered", points=0), "gives no points"),
    "no hidden test": (
        with_source(toy_lesson(), q1_is_answered='assert q1 == "B"'),
        "has no ### BEGIN HIDDEN TESTS",
    ),
    "solution elsewhere": (
        with_source(toy_lesson(), try_it="### BEGIN SOLUTION\n1\n### END SOLUTION"),
        "has a solution region but is no solution cell",
    ),
    "prediction without tag": (retagged("my_ms"), "but not the tag predict"),
    "prediction without line": (
        with_source(toy_lesson(), my_ms="my_ms = 3"),
        "no line `name = value  # your prediction`",
    ),
    "quiz without tag": (retagged("q1"), "has a #@param choice but not the tag quiz"),
    "no set-up": (retagged("setup"), "the first code cell, and no other"),
    "set-up without address": (
        with_source(toy_lesson(), setup="%pip install decodelab"),
        "must install from {{REPOSITORY}}",
    ),
    "unknown placeholder": (with_source(toy_lesson(), title="{{AUTHOR}}"), "nothing fills"),
    "no solution region": (
        with_source(toy_lesson(), weight_bytes="def weight_bytes(a, b):\n    return 8"),
        "has no ### BEGIN SOLUTION region",
    ),
    "no docstring": (
        with_source(toy_lesson(), weight_bytes=re.sub(r' +""".*"""\n', "", EXERCISE)),
        "has no docstring",
    ),
    "solution outside a function": (
        with_source(toy_lesson(), weight_bytes="### BEGIN SOLUTION\nx = 1\n### END SOLUTION"),
        "is not inside a function or class",
    ),
    "no test": (
        without(without(toy_lesson(), "weight_bytes_counts_two_bytes_each"), "q1_is_answered"),
        "no test cell follows the exercise",
    ),
    "variable of another name": (
        with_source(toy_lesson(), q1=QUIZ.replace("q1", "q2")),
        "variable and grade_id must be one name",
    ),
    "feedback missing": (with_feedback(D="An option that isn't there."), "needs metadata"),
    "feedback tells": (with_feedback(A="No: the answer is B."), "names the right letter"),
    "visible test raises on ?": (
        with_source(toy_lesson(), q1_is_answered=QUIZ_TEST.replace('"?", ', "", 1)),
        "Run All would stop",
    ),
    "hidden test wants another letter": (
        with_source(toy_lesson(), q1_is_answered=QUIZ_TEST.replace('== "B"', '== "C"')),
        "the test of 'q1' fails on 'B'",
    ),
}


def test_the_toy_lesson_keeps_the_conventions() -> None:
    check_source(toy_lesson(), LESSON)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_source_is_named(fault: str) -> None:
    nb, sentence = FAULTS[fault]
    with pytest.raises(ConventionError, match=re.escape(sentence)):
        check_source(nb, LESSON)


TOY_WRONG = {
    "weight_bytes": [
        f"def weight_bytes(layers, width):\n    return {wrong}"
        for wrong in ("layers * width**2", "layers * width * 2", "8 * layers * width")
    ]
}


def test_the_mutants_of_the_toy_lesson_all_score_0() -> None:
    assert list(mutants.faults(toy_lesson(), TOY_WRONG)) == []


@pytest.mark.parametrize(
    ("nb", "wrong", "sentence"),
    [
        (
            with_source(
                toy_lesson(),
                weight_bytes_counts_two_bytes_each=EXERCISE_TEST.replace("2\nassert", "2\n0 and"),
            ),
            {"weight_bytes": [*TOY_WRONG["weight_bytes"], "weight_bytes = lambda l, w: 8"]},
            "the answer 'wrong 4' is wrong and gets all 2 points",
        ),
        (
            with_source(toy_lesson(), weight_bytes=EXERCISE.replace("* 2\n", "* 4\n")),
            TOY_WRONG,
            "the answer 'reference' gets 0 of 2 points",
        ),
        (toy_lesson(), {"weight_bytes": TOY_WRONG["weight_bytes"][:2]}, "keep at least 3"),
        (toy_lesson(), TOY_WRONG | {"nowhere": []}, "which is no exercise"),
    ],
)
def test_a_weak_test_is_found_by_its_mutants(
    nb: NotebookNode, wrong: dict[str, list[str]], sentence: str
) -> None:
    assert any(sentence in fault for fault in mutants.faults(nb, wrong))
