"""Text to token ids and back, with a tokenizer.json that came from a runtime.

Why this is more than a call into `tokenizers`: a chat prompt mixes text that may steer the model
(the template's) with text that must not (the client's). The rules that hold here:

- A control token comes from the template only. Before the template sees a client's text, every
  character of it that occurs in any control token is replaced by a private one; what the template
  returns is split at its control tokens, and only then do the characters return. So no spelling
  and no concatenation can form a control token, while `trim` and the like still work.
- A role is one of a fixed list, because templates compare it and write it unquoted.
- The template runs in Jinja's immutable sandbox; whatever it raises is an error in words.
- Streamed text never splits a character, and the pieces add up to what decoding all ids gives.
"""

import codecs
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec

from dataplane.errors import DataplaneError
from dataplane.installing import pip_install

if TYPE_CHECKING:
    import jinja2

ROLES = ("system", "developer", "user", "assistant", "tool")

# Supplementary Private Use Area-A: characters that stand for nothing by themselves.
_PRIVATE = range(0xF0000, 0xFFFFE)
_IN_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")
_REPLACEMENT = "\ufffd"

# A character has at most four bytes, so that many undecodable ids in a row are no character's
# beginning: they are given out as they are, rather than held and decoded again for ever.
_MOST_HELD = 16

# Steps before the model that keep every byte of a text.
_KEEPING = frozenset((b"Sequence", b"ByteLevel", b"Digits", b"Split"))
_STEP_TYPE = re.compile(rb'"type":"([A-Za-z]+)"')

_MISSING = "{} is not installed: `dataplane model install` or `" + pip_install("smollm2") + "`"


class TextError(DataplaneError):
    """A text, a message or a chat template that cannot become token ids."""


class TokenizerError(DataplaneError):
    """A tokenizer.json that cannot be used, or no library to use it with."""


class _Document(msgspec.Struct):
    """What of a tokenizer.json its library does not tell."""

    pre_tokenizer: Any = None


class TextStream(Protocol):
    """Turns ids into text as they come."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become certain; ids that are unknown or special add none."""

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that never came to its end."""


# ---------------------------------------------------------------- streams


class _ByteStream:
    """For byte-level tokenisers: each id is a fixed run of bytes, so this is exact and cheap."""

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(self._table.get(number, b"") for number in ids))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _WindowStream:
    """For any other tokeniser: text is what an id adds to the text of the ids before it."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], has_text: Callable[[int], bool]
    ) -> None:
        self._decode = decode
        self._has_text = has_text
        self._context: list[int] = []  # given out already; decides how the next one is spaced
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push(number) for number in ids if self._has_text(number)])

    def _push(self, number: int) -> str:
        self._held.append(number)
        if len(self._held) < _MOST_HELD and self._decode(self._held).endswith(_REPLACEMENT):
            return ""
        return self.flush()

    def flush(self) -> str:
        if not self._held:
            return ""
        before = len(self._decode(self._context))
        text = self._decode(self._context + self._held)[before:]
        # Ids that add nothing by themselves still space the next one.
        self._context, self._held = self._held if text else self._context + self._held, []
        return text


def _byte_of_character() -> dict[str, int]:
    """The alphabet in which byte-level vocabularies are written: one character for each byte.

    Bytes that print stand for themselves; the others are numbered upwards from U+0100.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printing))
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _byte_table(vocabulary: Mapping[str, int], skipped: Collection[int]) -> dict[int, bytes]:
    alphabet = _byte_of_character()
    table: dict[int, bytes] = {}
    for token, number in vocabulary.items():
        if number in skipped:
            continue
        try:
            table[number] = bytes([alphabet[character] for character in token])
        except KeyError:
            table[number] = token.encode()
    return table


# ---------------------------------------------------------------- chat templates


def _refuse(reason: object = "it gives no reason") -> NoReturn:
    """What templates call when they do not like the messages they are given."""
    raise TextError(f"the chat template refuses these messages: {reason}")


@lru_cache(maxsize=16)
def _compile(template: str) -> "jinja2.Template":
    try:
        import jinja2.sandbox
    except ImportError as error:
        raise TokenizerError(_MISSING.format("jinja2")) from error
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        autoescape=False, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise TextError(f"the runtime's chat template does not compile: {error}") from error


def _render(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    compiled = _compile(template)
    try:
        return compiled.render(messages=messages, add_generation_prompt=True)
    except DataplaneError:
        raise
    except Exception as error:  # a template can raise anything that Python can
        reason = f"{type(error).__name__}: {error}"
        raise TextError(f"the runtime's chat template fails on these messages: {reason}") from error


def _checked(messages: Sequence[Mapping[str, object]]) -> list[tuple[str, str]]:
    if not messages:
        raise TextError("messages is empty: send at least one")
    checked = []
    for place, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise TextError(f"messages[{place}].role is not one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise TextError(f"messages[{place}].content is not a string")
        checked.append((role, content))
    return checked


class _Veil:
    """Swaps the characters that control tokens are made of for private ones, and back."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        self._alphabet = sorted({ord(character) for token in control_tokens for character in token})
        self._usual = self._pair(_PRIVATE.start)

    def _pair(self, base: int) -> tuple[dict[int, int], dict[int, int]]:
        private = range(base, base + len(self._alphabet))
        return (
            dict(zip(self._alphabet, private, strict=True)),
            dict(zip(private, self._alphabet, strict=True)),
        )

    def tables(self, texts: Sequence[str]) -> tuple[dict[int, int], dict[int, int]]:
        """Translation tables there and back, over private characters that no text holds."""
        taken = {ord(c) for text in texts if not text.isascii() for c in _IN_PRIVATE.findall(text)}
        if not taken:
            return self._usual
        size = max(1, len(self._alphabet))
        for base in range(_PRIVATE.start, _PRIVATE.stop - size, size):
            if taken.isdisjoint(range(base, base + size)):
                return self._pair(base)
        raise TextError("the messages hold too many private-use characters to be encoded safely")


# ---------------------------------------------------------------- the tokeniser


class Tokenizer:
    """A tokenizer.json at work. Nothing in it changes after it is made."""

    def __init__(self, document: bytes) -> None:
        try:
            from tokenizers import Tokenizer as Inner
            from tokenizers.decoders import ByteLevel
        except ImportError as error:
            raise TokenizerError(_MISSING.format("tokenizers")) from error
        # One text at a time: no pool of threads for that.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self._inner = Inner.from_buffer(document)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"the tokenizer.json cannot be used: {error}") from error
        # Plain text stays plain: the only control tokens are those that encode_chat puts in.
        self._inner.encode_special_tokens = True
        self._inner.no_padding()
        self._inner.no_truncation()
        added = self._inner.get_added_tokens_decoder()
        self._control = {token.content: number for number, token in added.items() if token.special}
        self._control_ids = frozenset(self._control.values())
        longest_first = sorted(self._control, key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._veil = _Veil(self._control)
        self._bytes: dict[int, bytes] | None = None
        if isinstance(self._inner.decoder, ByteLevel):
            vocabulary = self._inner.get_vocab(with_added_tokens=True)
            self._bytes = _byte_table(vocabulary, self._control_ids)
        self._longest = self._longest_token(document)

    def _longest_token(self, document: bytes) -> int:
        """Return how many bytes of text one id can stand for; 0 where nothing bounds that."""
        table = self._bytes
        # A normaliser or a split that removes text, an id for whatever is unknown, a token that
        # swallows the space around it: with those a few ids may stand for any length of text.
        if table is None or self._inner.normalizer is not None:
            return 0
        if len({value for value in table.values() if len(value) == 1}) < 256:
            return 0
        if any(t.lstrip or t.rstrip for t in self._inner.get_added_tokens_decoder().values()):
            return 0
        steps = msgspec.json.encode(msgspec.json.decode(document, type=_Document).pre_tokenizer)
        if not _KEEPING.issuperset(_STEP_TYPE.findall(steps)) or b'"Removed"' in steps:
            return 0
        return max(map(len, (*table.values(), *(name.encode() for name in self._control))))

    def _check_length(self, texts: Iterable[str], most: int | None) -> None:
        """Refuse what is more than `most` ids however it is split, before it costs anything."""
        if most is None or not self._longest:
            return
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if size > most * self._longest:
            raise TextError(
                f"the prompt has over {most} tokens, as its text of {size} bytes says;"
                f" the context is {most}"
            )

    @property
    def vocab_size(self) -> int:
        """How many ids there are, control tokens included."""
        size: int = self._inner.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of plain text: what looks like a control token in it is text as well.

        Text that cannot be as few as `most` ids is refused before it is looked through.
        """
        self._check_length((text,), most)
        try:
            # Of the two only this one lets other threads run.
            ids: list[int] = self._inner.encode_batch([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:  # the one for the other, by version
            raise TextError("the text is no valid Unicode: it holds a lone surrogate") from error
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], template: str, most: int | None = None
    ) -> list[int]:
        """Ids of a conversation, as the runtime's template lays it out."""
        checked = _checked(messages)
        there, back = self._veil.tables([template, *(content for _, content in checked)])
        veiled = [{"role": role, "content": content.translate(there)} for role, content in checked]
        rendered = _render(template, veiled)
        rendered_plain = rendered.translate(back)
        self._check_length((rendered_plain,), most)
        if not self._control:
            return self.encode(rendered_plain)
        ids: list[int] = []
        # With one group in the pattern, texts and control tokens take turns.
        for place, part in enumerate(self._splitter.split(rendered)):
            if place % 2:
                ids.append(self._control[part])
            else:
                ids += self.encode(part.translate(back))
        return ids

    def stream(self) -> TextStream:
        """A decoder for one answer."""
        if self._bytes is not None:
            return _ByteStream(self._bytes)
        return _WindowStream(self._inner.decode, self._has_text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole answer: exactly what its stream gives."""
        stream = self.stream()
        return stream.push(ids) + stream.flush()

    def _has_text(self, number: int) -> bool:
        return 0 <= number < self.vocab_size and number not in self._control_ids
