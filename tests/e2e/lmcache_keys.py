"""Names prompts' chunks as the controller's workers do: lists of token ids in, one a line, lists of keys out, as JSON.

Runs in the virtual environment that `setup_lmcache.sh` makes, under the same PYTHONHASHSEED as the controller.
"""

from __future__ import annotations

import json
import sys

# LMCache logs to standard output.
answers, sys.stdout = sys.stdout, sys.stderr

from lmcache.v1.token_database import ChunkedTokenDatabase  # noqa: E402

database = ChunkedTokenDatabase()
for line in sys.stdin:
    chunks = database.process_tokens(tokens=json.loads(line), make_key=False)
    print(
        json.dumps([key for start, end, key in chunks if end - start == database.chunk_size]), file=answers, flush=True
    )
