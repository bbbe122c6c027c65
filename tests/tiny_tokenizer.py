"""A tokenizer.json of 258 ids: one for each byte, and the two control tokens of a chat."""

from pathlib import Path

import pytest

START, END = 256, 257
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def byte_ids(text: str) -> list[int]:
    """The ids of plain text."""
    return list(text.encode())


def chat_ids(text: str) -> list[int]:
    """The ids of one message of the user's, as `TEMPLATE` lays it out."""
    asked = [START, *byte_ids(f"user\n{text}"), END, *byte_ids("\n")]
    return [*asked, START, *byte_ids("assistant")]


def make_tokenizer(path: Path) -> Path:
    """Write it to a file."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = _byte_alphabet()
    model = tokenizers.models.BPE({character: byte for byte, character in alphabet.items()}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path.write_text(tokenizer.to_str())
    return path


def _byte_alphabet() -> dict[int, str]:
    """How byte-level vocabularies spell each byte: as it prints, else from U+0100 upwards."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {
        **{byte: chr(byte) for byte in printing},
        **{byte: chr(0x100 + place) for place, byte in enumerate(others)},
    }
