"""What a user would run instead: one file a server, each written as that server's own users would.

All do the work of `bench/work.py`. On `STREAM_PATH` they give the prompt's first ids back, one by
one, with the wait of a model before each.
"""

import os

from bench.cases import ECHO_IDS
from bench.work import DELAY_VARIABLE

TOKENS = ECHO_IDS
TOKEN_DELAY_S = float(os.environ.get(DELAY_VARIABLE, "0"))
