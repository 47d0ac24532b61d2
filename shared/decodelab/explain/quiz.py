"""Answer a multiple-choice question at once, with the misconception behind each wrong option.

The sentences lie in quizzes/LESSON.json, one entry per option, enciphered under a slow hash of
question and option: nobody reads an answer there by accident. It is no lock, as four options can
all be tried; points come from hidden tests. Standard library only, apart from the display.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "quizzes"
UNANSWERED = "?"

# Word, sign and colour (Okabe-Ito) of each state: the colour alone says nothing.
LOOKS = {
    "right": ("Right.", "\u2713", "#009E73"),
    "wrong": ("Not yet.", "\u2717", "#D55E00"),
    "unanswered": ("Your turn.", "?", "#56B4E9"),
    "unknown": ("No such option.", "!", "#E69F00"),
}


class QuizError(ValueError):
    """A lesson or question without stored feedback: the notebook's fault, not its reader's."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said about one answer; `state` is "right", "wrong", "unanswered" or "unknown"."""

    question: str
    state: str
    text: str

    def __str__(self) -> str:
        word, sign, _ = LOOKS[self.state]
        return f"{sign} {self.question}: {word} {self.text}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        word, sign, colour = LOOKS[self.state]
        return (
            f'<div role="status" style="border-left:4px solid {colour};padding:2px 10px">'
            f'<span aria-hidden="true">{sign}</span> {escape(self.question)}: '
            f"<strong>{word}</strong> {escape(self.text)}</div>"
        )


class Quiz:
    """The questions of one lesson; `lesson` is its name or the beginning of it."""

    def __init__(self, lesson: str, folder: Path = FOLDER) -> None:
        names = sorted(path.stem for path in folder.glob("*.json"))
        found = [n for n in names if n == lesson] or [n for n in names if n.startswith(lesson)]
        if len(found) != 1:
            raise QuizError(
                f"no single lesson is called {lesson!r}; there is feedback for "
                f"{', '.join(names) or 'none'}. Is the lesson new? Run `make release`."
            )
        data = json.loads((folder / f"{found[0]}.json").read_text(encoding="utf-8"))
        self.lesson = found[0]
        self._salt = bytes.fromhex(data["salt"])
        self._options: dict[str, list[str]] = data["options"]
        self._entries: dict[str, str] = data["entries"]

    def check(self, question: str, answer: object) -> None:
        """Show at once whether `answer` is right, and why; no answer raises."""
        show(self.verdict(question, answer))

    def verdict(self, question: str, answer: object) -> Verdict:
        """Judge one answer; raises QuizError only for a question that the lesson doesn't have."""
        if question not in self._options:
            raise QuizError(
                f"{self.lesson} has no question {question!r}; it has {', '.join(self._options)}. "
                "Is the question new? Run `make release`."
            )
        options = self._options[question]
        known = isinstance(answer, str)  # an array, say, would not even compare to a bool
        if answer is None or answer is Ellipsis or (known and answer == UNANSWERED):
            text = f"Choose one of {', '.join(options)} and run the cell again."
            return Verdict(question=question, state="unanswered", text=text)
        if not known or answer not in options:
            text = f"{answer!r:.60} is not among {', '.join(options)}. Write one letter in quotes."
            return Verdict(question=question, state="unknown", text=text)
        name, stream = _key(self._salt, question, answer)
        sealed = base64.b64decode(self._entries[name])
        record = json.loads(_xor(sealed, stream).rstrip(b"\0"))
        state = "right" if record["right"] else "wrong"
        return Verdict(question=question, state=state, text=record["text"])


def check(question: str, answer: object, lesson: str) -> None:
    """Show at once whether `answer` to a lesson's question is right, and why."""
    Quiz(lesson).check(question, answer)


def show(verdict: Verdict) -> None:
    """Display in a notebook, print elsewhere."""
    try:
        from IPython.display import display  # here, so that quizzes can be read without IPython
    except ImportError:
        print(verdict)
    else:
        display(verdict)


def seal(lesson: str, feedback: Mapping[str, Mapping[str, str]], right: Mapping[str, str]) -> dict:
    """Encipher a lesson's feedback {question: {option: sentence}}; the same input, the same bytes.

    All entries have one length and lie in the order of their hashes, so neither tells anything.
    """
    salt = hashlib.sha256(b"decodelab quiz " + lesson.encode()).digest()[:16]
    plain = {
        (question, option): json.dumps({"right": option == right[question], "text": text}).encode()
        for question, options in feedback.items()
        for option, text in options.items()
    }
    width = -(-max(map(len, plain.values()), default=1) // 256) * 256
    entries = {}
    for (question, option), record in plain.items():
        name, stream = _key(salt, question, option)
        entries[name] = base64.b64encode(_xor(record.ljust(width, b"\0"), stream)).decode()
    return {
        "lesson": lesson,
        "salt": salt.hex(),
        "options": {question: sorted(options) for question, options in feedback.items()},
        "entries": dict(sorted(entries.items())),
    }


def _key(salt: bytes, question: str, option: str) -> tuple[str, "hashlib._Hash"]:
    """Return an entry's name and its key stream, both from one slow hash (about 50 ms)."""
    secret = f"{question}\0{option}".encode()
    key = hashlib.scrypt(secret, salt=salt, n=2**14, r=8, p=1, dklen=32)
    return hashlib.sha256(b"name" + key).hexdigest()[:32], hashlib.shake_256(b"text" + key)


def _xor(data: bytes, stream: "hashlib._Hash") -> bytes:
    return bytes(a ^ b for a, b in zip(data, stream.digest(len(data)), strict=True))
