"""`python -m blockscale`: the command, for when its script is not on the path."""

import sys

from blockscale.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
