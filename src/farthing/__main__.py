"""``python -m farthing`` is the command ``farthing``."""

import sys

from farthing.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
