"""The kinds of text that settings of several sections have."""

from __future__ import annotations

from smetric.config.address import PathRef
from smetric.config.kind import Text

MODEL = Text(r"[\x21-\x7e]{1,256}", "a model name of 1 to 256 printable ASCII characters")
ENDPOINT = Text(
    r"tcp://\S{1,255}:(?:[0-9]{1,5}|[0-9]?\{port\})|ipc://\S{1,255}",
    "a ZeroMQ address such as tcp://{host}:5557",
    empty=True,
)
SECRET_FILE = PathRef(empty=True, what="a file")
