"""What the command line asks with: token ids as they are typed, and text that becomes ids here.

Over the raw protocol text has to become ids before it is sent. The runtime's own tokeniser does
that, fetched from the daemon, so that nothing of the model has to be installed here.
"""

import codecs
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from dataplane.client import connect
from dataplane.client.h3 import Http3Client, Page
from dataplane.client.http import decode_json, read_reason
from dataplane.config import state_dir_of
from dataplane.errors import DataplaneError, Status, UnavailableError, UsageError
from dataplane.identity import make_state_dir
from dataplane.prompt1 import ProtocolError
from dataplane.text import TextError, TextStream, Tokenizer

_ID = re.compile(r"[0-9]{1,10}")
_ID_MOST = 2**32 - 1


# ---------------------------------------------------------------- ids


class IdText:
    """Shows ids as numbers with commas, as `--ids` takes them."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, ids: Iterable[int]) -> str:
        text = "".join(f",{number}" for number in ids)
        if not self._separator:
            text = text[1:]
        self._separator = self._separator or text[:1]
        return text

    def flush(self) -> str:
        return ""


def parse_ids(source: str, text: str) -> list[int]:
    """Read token ids that stand between commas or white space.

    Raises:
        UsageError: One of them is no id, or there is none; the text names it and its place.
    """
    words = re.split(r"\s*,\s*|\s+", text.strip())
    ids = []
    for place, word in enumerate(words, 1):
        if not _ID.fullmatch(word) or int(word) > _ID_MOST:
            shown = repr(word) if word else "nothing"
            raise UsageError(
                f"{source}: number {place} is {shown}; ids are whole numbers from 0 to {_ID_MOST}"
                " with commas or white space between them"
            )
        ids.append(int(word))
    return ids


def read_ids(path: str) -> list[int]:
    """Read a file of token ids.

    Raises:
        UsageError: It cannot be read, or holds anything else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--ids-file {path}: it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--ids-file {path}: it is no text") from error
    return parse_ids(f"--ids-file {path}", text)


# ---------------------------------------------------------------- text


class Codec(Protocol):
    """Text to ids, and an answer's ids to text."""

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt."""

    def stream(self) -> TextStream:
        """A decoder for one answer."""


class TextCodec:
    """A tokeniser, with a chat template if there is one to use."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, prompt: str) -> list[int]:
        if self._template is None:
            return self._tokenizer.encode(prompt)
        return self._tokenizer.encode_chat([{"role": "user", "content": prompt}], self._template)

    def stream(self) -> TextStream:
        return self._tokenizer.stream()


def model_codec(state_dir: Path, chat: bool = True) -> Codec:
    """Return the small model's tokeniser, with its chat template unless `chat` is off.

    Raises:
        DataplaneError: The model is not installed here.
    """
    from dataplane import model

    weights = model.locate_weights()
    make_state_dir(state_dir)
    document = model.tokenizer_json(weights, state_dir).read_bytes()
    return TextCodec(Tokenizer(document), model.CHAT_TEMPLATE if chat else None)


class ByteCodec:
    """For a runtime without a vocabulary, as echo: a text's bytes are its ids."""

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode("utf-8", "surrogateescape"))

    def stream(self) -> TextStream:
        return _ByteText()


class _ByteText:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(number if number < 256 else 0x3F for number in ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


# ---------------------------------------------------------------- the daemon's tokeniser


class PageRefusedError(DataplaneError):
    """The daemon refused one of its pages; the text is its reason.

    Attributes:
        status: Its answer's.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def fetch_codec(
    server: str,
    ca: Path | None,
    chat: bool,
    say: Callable[[str], None],
    *,
    pump: bool = True,
    api_key: bytes | None = None,
) -> Codec:
    """Return the tokeniser of a daemon's runtime, or the small model's where that one has none.

    Args:
        server: `HOST:PORT`.
        ca: The file to verify it with; the state directory's if None.
        chat: Whether to lay text out as a chat, with the runtime's template.
        say: Told when it is the small model's.
        pump: Whether the packet pump does the packets; False: aioquic alone.
        api_key: Who asks, or None.

    Raises:
        UnavailableError: The daemon cannot be reached, or has no runtime.
        PageRefusedError: It refuses for another reason, as for the want of a key.
        DataplaneError: There is no tokeniser to be had.
    """
    async with connect(server, ca, protocol="h3", pump=pump) as client:
        template = await _fetch_template(client, api_key)
        page = await client.get("/tokenizer.json", api_key=api_key)
    if page.status == Status.OK:
        if chat and template is None:
            raise TextError("the runtime has no chat template: use --no-chat, or give --ids")
        return TextCodec(Tokenizer(page.body), template if chat else None)
    if page.status != Status.NOT_FOUND:
        raise _refused(page)
    try:
        codec = model_codec(state_dir_of(None, os.environ), chat)
    except DataplaneError as error:
        raise TextError(
            f"{read_reason(page.body)}; give --ids, or have one here: {error}"
        ) from error
    say("the runtime has no tokeniser: using the one of the small model that is installed here")
    return codec


async def _fetch_template(client: Http3Client, api_key: bytes | None) -> str | None:
    page = await client.get("/props", api_key=api_key)
    if page.status != Status.OK:
        raise _refused(page)
    properties = decode_json(page.body)
    template = properties.get("chat_template") if isinstance(properties, dict) else None
    if template is not None and not isinstance(template, str):
        raise ProtocolError("the runtime's chat template is no text")
    return template


def _refused(page: Page) -> DataplaneError:
    reason = read_reason(page.body)
    if page.status == Status.UNAVAILABLE:
        return UnavailableError(reason)
    return PageRefusedError(page.status, reason)
