"""The three descriptors that a process may expect to have, also where whoever started it closed some."""

from __future__ import annotations

import io
import os
import sys


def have_standard_streams() -> None:
    """Open the null device for what whoever started this process closed of descriptors 0 to 2.

    A connection would get the number, and its client what a library complains of to the standard error. It comes before
    whatever may open a file, and keep it, while it is imported: libffi does, from 3.5 on.

    What the encoding of an output has no sign for is written there as an escape, so that ✓ and ✗ stay apart.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
