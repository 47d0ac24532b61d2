"""Text from tokens as they come: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

HELD_TOKENS = 8  # a character of four bytes may be four tokens; beyond, it's no character
HALF = "\ufffd"  # what decoders put for bytes that make no character, or don't yet


class TextStream:
    """The text of one output, piece by piece; `stopped` once one of `stops` has come.

    `push` and `finish` return what is new and can't change any more: the text ends before the stop
    string, wherever the borders of the tokens fall. `decode` turns token ids into text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode, self._stops = decode, stops
        self._tokens: list[int] = []  # the latest ones, of which the first `_read` are text already
        self._read = 0
        self._held = ""  # it may be the beginning of a stop string

    def push(self, token: int) -> str:
        """Take the next token; what comes after a stop string is dropped."""
        return self._cut(self._characters(token))

    def finish(self) -> str:
        """What was held back, now that no more tokens come."""
        text, _ = self._text()
        rest = self._cut(text)
        return rest if self.stopped else rest + self._held

    def _characters(self, token: int) -> str:
        self._tokens.append(token)
        text, whole = self._text()
        if not whole and len(self._tokens) - self._read < HELD_TOKENS:
            return ""
        # The tokens just read stay as context: some tokenizers drop the first space of a text.
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        return text

    def _text(self) -> tuple[str, bool]:
        """What the unread tokens say after the read ones, and whether no half character ends it."""
        before = self._decode(self._tokens[: self._read])
        text = self._decode(self._tokens)
        return text[len(before) :], not text.endswith(HALF)

    def _cut(self, text: str) -> str:
        """Hold back what may begin a stop string, and drop all from a whole one on."""
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped = True
            return text[: min(places)]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        keep = len(text) - held
        self._held = text[keep:]
        return text[:keep]


def overlap(text: str, stop: str) -> int:
    """The most characters of `stop`'s beginning that `text` ends with, and not the whole of it."""
    return next((k for k in range(len(stop) - 1, 0, -1) if text.endswith(stop[:k])), 0)
