"""API keys on the client's side: where the command line finds one, and how it goes over HTTP/3.

The rules that hold here:

- A key is no flag's value, since everybody on the machine sees those: it comes from a file, or from
  the environment.
- A key is never shown: no error's text has one in it.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from dataplane.config import API_KEY_VARIABLE
from dataplane.errors import UsageError
from dataplane.http3_fields import Pair
from dataplane.prompt1 import API_KEY_MAX

FLAG = "--api-key-file"
HINT = f"a key comes from {FLAG} FILE, or else from {API_KEY_VARIABLE}"
"""What to do about a 401."""

# What a header field holds (RFC 9110 section 5.5); blanks only between other characters.
_VALUE = re.compile(rb"[\x21-\x7e\x80-\xff]+(?:[ \t]+[\x21-\x7e\x80-\xff]+)*")


def encode_key(api_key: str | bytes) -> bytes:
    """Return the bytes of a key.

    Raises:
        UsageError: It is no Unicode.
    """
    if isinstance(api_key, bytes):
        return api_key
    try:
        return api_key.encode()
    except UnicodeEncodeError:
        # Without its cause, which has the key in its text.
        raise UsageError("the API key is no valid Unicode: it holds a lone surrogate") from None


def key_fields(api_key: str | bytes | None) -> list[Pair]:
    """Return the header fields that carry a key; none for None.

    Raises:
        UsageError: A header field cannot hold it.
    """
    if api_key is None:
        return []
    key = encode_key(api_key)
    _check("the API key", key)
    return [(b"authorization", b"Bearer " + key)]


def read_api_key(file: Path | None, environ: Mapping[str, str]) -> bytes | None:
    """Return the key to ask with: a file's first line, or else the variable's; blanks around it go.

    Args:
        file: What `--api-key-file` names, or None. It is read to the end of its first line only.
        environ: The process's environment. A variable that is empty counts as none.

    Raises:
        UsageError: The file cannot be read or has no key, or a key is one that cannot be sent.
    """
    if file is None:
        # The environment's bytes: a key need not be text.
        key = environ.get(API_KEY_VARIABLE, "").encode("utf-8", "surrogateescape").strip()
        if key:
            _check(API_KEY_VARIABLE, key)
        return key or None
    source = f"{FLAG} {file}"
    try:
        with file.open("rb") as opened:
            # One more than a key may have, and a line's end: enough to see that it is too long.
            line = opened.readline(API_KEY_MAX + 3)
    except OSError as error:
        raise UsageError(f"{source}: it cannot be read: {error.strerror}") from error
    key = line.strip()
    if not key:
        raise UsageError(f"{source}: its first line is to be the API key, and there is none in it")
    _check(source, key)
    return key


def _check(source: str, key: bytes) -> None:
    """Hold a key against what both protocols can carry."""
    if not _VALUE.fullmatch(key):
        raise UsageError(
            f"{source}: a key is one line of visible characters, and this one is empty, begins or"
            " ends with a blank, or holds a control character"
        )
    if len(key) > API_KEY_MAX:
        raise UsageError(f"{source}: a key has at most {API_KEY_MAX} bytes, and this one has more")
