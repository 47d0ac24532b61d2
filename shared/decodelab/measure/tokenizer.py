"""Text to token ids and back, and a chat as the one prompt that its model was trained on.

Over the `tokenizers` library and jinja2, both loaded only here. A tokenizer comes from a Hugging
Face folder or hub id, from a GGUF file, or is made of bytes for a model of random weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from .weights import Checkpoint, download, need, open_gguf

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
TEMPLATE_FILE = "chat_template.jinja"
TEXT_FILES = (*FILES, TEMPLATE_FILE)
SPECIAL = ("bos_token", "eos_token")
CONTROL, USER_DEFINED = 3, 4  # GGUF's kinds of tokens that are never a piece of plain text
PLAIN_CHAT = (  # for a model that was never taught any: "role: content" a line
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


class Tokenizer:
    """`encode`, `decode` and `chat`, over a `tokenizers.Tokenizer` named `backend`.

    `eos` holds the ids that end an answer, `special` the texts of "bos_token" and "eos_token" where
    the model has them, `template` its own chat template (jinja).
    """

    def __init__(
        self,
        backend: object,
        *,
        eos: Iterable[int] = (),
        special: Mapping[str, str] | None = None,
        template: str | None = None,
    ) -> None:
        self.backend, self.eos = backend, frozenset(eos)
        self.special, self.template = dict(special or {}), template

    @classmethod
    def from_pretrained(cls, source: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder or hub id, or of a *.gguf file.

        Raises ValueError that says what is missing or isn't served.
        """
        path = Path(source).expanduser()
        if path.suffix == ".gguf":
            return cls.from_checkpoint(open_gguf(path))
        return _from_folder(path if path.is_dir() else download(str(source), TEXT_FILES))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer beside weights that are already open."""
        return (
            _from_gguf(checkpoint) if checkpoint.fields else cls.from_pretrained(checkpoint.where)
        )

    @classmethod
    def of_bytes(cls, vocab: int = 256) -> Tokenizer:
        """A token a byte, for random weights; ids from 256 on decode as a space and their number.

        Nothing ends an answer: random weights know no end.
        """
        if vocab < 256:
            raise ValueError(f"A byte tokenizer needs a vocabulary of at least 256, not {vocab}.")
        tokenizers = _tokenizers()
        letters = byte_letters()
        names = [*letters, *(f"{letters[ord(' ')]}{id}" for id in range(256, vocab))]
        vocabulary = {name: id for id, name in enumerate(names)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        return cls(_byte_level(backend), template=PLAIN_CHAT)

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with what its model wants before it, such as a BOS token."""
        return self.backend.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out; ids beyond the vocabulary are, too."""
        return self.backend.decode(list(ids))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a chat, ready for the answer; each message has a "role" and a "content".

        Raises ValueError where the model has no chat template, or its template refuses the chat.
        """
        return self.backend.encode(self.chat_text(messages), add_special_tokens=False).ids

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that `chat` encodes: the template's text, up to where the answer starts."""
        if self.template is None:
            raise ValueError("This model has no chat template: send it a plain prompt instead.")
        jinja2 = need("jinja2", "write a chat by its template")
        try:
            return _environment(self.template).render(
                messages=list(messages), add_generation_prompt=True, **self.special
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"The chat template refuses these messages: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write the files that Hugging Face's and vLLM's loaders read, into an existing folder."""
        folder = Path(folder)
        self.backend.save(str(folder / FILES[0]))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
        about |= {"chat_template": self.template, "clean_up_tokenization_spaces": False}
        _write(folder / FILES[1], about)
        _write(folder / FILES[2], {"eos_token_id": sorted(self.eos) or None})


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte 0..255, as GPT-2 has it.

    Printable bytes stand for themselves; the others follow from U+0100 on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _from_folder(folder: Path) -> Tokenizer:
    if not (folder / FILES[0]).is_file():
        raise ValueError(f"{folder} has no {FILES[0]}: download the model with its tokenizer.")
    about, generation, model = (_read(folder / name) for name in FILES[1:])
    try:
        backend = _tokenizers().Tokenizer.from_file(str(folder / FILES[0]))
    except Exception as error:  # the library has no other kind
        raise ValueError(f"{folder / FILES[0]} is no tokenizer: {error}") from error
    template = about.get("chat_template")
    if (folder / TEMPLATE_FILE).is_file():
        template = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    if isinstance(template, list):  # several, by name
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    ends = generation.get("eos_token_id", model.get("eos_token_id"))
    special = {name: _text(about[name]) for name in SPECIAL if about.get(name)}
    if ends is None and "eos_token" in special:
        ends = backend.token_to_id(special["eos_token"])
    eos = ends if isinstance(ends, list) else [ends] * (ends is not None)
    return Tokenizer(backend, eos=eos, special=special, template=template)


def _from_gguf(file: Checkpoint) -> Tokenizer:
    """Byte-level BPE rebuilt from what the file says of it."""

    def field(key: str, default: object = None) -> object:
        return file.fields[key].contents() if key in file.fields else default

    kind, before = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre", "gpt-2")
    starts = field("tokenizer.ggml.add_bos_token", False)
    if kind != "gpt2" or before not in ("smollm", "gpt-2") or starts:
        raise ValueError(
            f"{file.where} has a tokenizer of the kind {kind!r}/{before!r}, which is not served: "
            "take the Hugging Face folder of the same model."
        )
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizers = _tokenizers()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend = _byte_level(backend, digits_apart=before == "smollm")
    named = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens([token for token, kind in named if kind == CONTROL])
    backend.add_tokens([token for token, kind in named if kind == USER_DEFINED])
    ids = {name: field(f"tokenizer.ggml.{name}_id") for name in SPECIAL}
    return Tokenizer(
        backend,
        eos={ids["eos_token"]} - {None},
        special={name: tokens[id] for name, id in ids.items() if id is not None},
        template=field("tokenizer.chat_template"),
    )


def _byte_level(backend: object, digits_apart: bool = False) -> object:
    pre, decoders = _tokenizers().pre_tokenizers, _tokenizers().decoders
    parts = [pre.Digits(individual_digits=True)] if digits_apart else []
    backend.pre_tokenizer = pre.Sequence([*parts, pre.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _environment(template: str) -> object:
    """The template, where it can reach nothing but what it is handed."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template)


def _text(token: str | Mapping) -> str:
    """A special token, which a config spells as a string or as a table with its "content"."""
    return token["content"] if isinstance(token, Mapping) else token


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write(path: Path, table: Mapping) -> None:
    kept = {name: value for name, value in table.items() if value is not None}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizers() -> ModuleType:
    return need("tokenizers", "turn text into tokens")
