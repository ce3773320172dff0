"""The process that reads a large JSON snapshot: the file on standard input, and on standard output
the same in the binary form, or why it cannot be. It ends with the broker, whose end closes both.
"""

from __future__ import annotations

import sys

from millstream.log.snapshot import CHILD_READS, CHILD_REFUSES, binary_pieces, parse_json


def main() -> None:
    output = sys.stdout.buffer
    try:
        snapshot = parse_json(sys.stdin.buffer.read())
    except ValueError as error:
        output.write(CHILD_REFUSES + str(error).encode())
        return
    output.write(CHILD_READS)
    for buffers in binary_pieces(snapshot):
        output.writelines(buffers)


if __name__ == "__main__":
    main()
