"""`python -m dataplane`: the command line."""

import sys

from dataplane.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
