"""A file as blocks of whole lines, in bounded memory whatever the file holds. Pure: no I/O of its own.

Line numbers count every line, blank ones too. A line ends with a line feed; a carriage return before it is white space.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_BLANK_BYTES = 256 * 1024 * 1024
"""A line of more white space than this is no blank line any more: whoever reads it later need not read it to its end.
"""


class Block(NamedTuple):
    """Whole lines that follow each other, with what is needed to name each of them."""

    first_line: int
    """0-based number of its first line."""
    offset: int
    """Where `data` starts in the file."""
    data: bytes
    """The lines with their line feeds; only the file's last line may lack it. A byte order mark is already gone."""
    is_cut: bool = False
    """`data` is only the beginning of one line that is too long; the rest of that line was skipped."""

    @property
    def is_verbatim(self) -> bool:
        """`data` are surely the file's own bytes from `offset`: no part of a line, no mark that was replaced."""
        return not self.is_cut and self.offset > 0 and len(self.data) > 1

    @property
    def lines(self) -> int:
        """How many lines it holds."""
        return self.data.count(b"\n") + (not self.data.endswith(b"\n"))


def read_blocks(pieces: Iterable[bytes], max_line_bytes: int) -> Iterator[Block]:
    """Yield the file, given as pieces of any size, as blocks of whole lines.

    A line whose end does not come within `max_line_bytes` is yielded as a block that `is_cut`, and its rest, however
    long, is skipped. Lines that are too long inside one piece are left for the reader of the block to see. Memory:
    the largest piece and one line.
    """
    line, offset, rest = 0, 0, b""
    stream = _without_mark(pieces)
    for piece in stream:
        data = rest + piece
        whole = data.rfind(b"\n") + 1
        if whole:
            block = Block(line, offset, data[:whole])
            yield block
            line, offset, data = line + block.lines, offset + whole, data[whole:]
        rest = data
        if len(rest) > max_line_bytes:
            skipped, is_blank, following = _skip_line(stream)
            if is_blank and len(rest) + skipped <= MAX_BLANK_BYTES and not rest.strip():
                yield Block(line, offset, b"\n")
            else:
                yield Block(line, offset, rest[: max_line_bytes + 1], is_cut=True)
            line, offset, rest = line + 1, offset + len(rest) + skipped, following
    if rest:
        yield Block(line, offset, rest)


def _skip_line(stream: Iterator[bytes]) -> tuple[int, bool, bytes]:
    """Read to the end of the line; return the bytes skipped, whether they were blank, and what was read behind them."""
    skipped, is_blank = 0, True
    for piece in stream:
        end = piece.find(b"\n") + 1 or len(piece)
        skipped += end
        is_blank = is_blank and not piece[:end].strip()
        if piece[end - 1 : end] == b"\n":
            return skipped, is_blank, piece[end:]
    return skipped, is_blank, b""


def _without_mark(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Replace a byte order mark at the start by spaces, so that the offsets of all that follows stay true."""
    head = b""
    pieces = iter(pieces)
    for piece in pieces:
        head += piece
        if len(head) >= len(BYTE_ORDER_MARK):
            break
    if head.startswith(BYTE_ORDER_MARK):
        head = b"   " + head[len(BYTE_ORDER_MARK) :]
    if head:
        yield head
    yield from pieces
