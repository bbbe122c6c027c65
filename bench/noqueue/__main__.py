"""`python -m bench.noqueue`: this section alone."""

import sys

from bench.noqueue import lines, plot, run
from bench.noqueue.alone import main

if __name__ == "__main__":
    sys.exit(main(run, lines, plot))
