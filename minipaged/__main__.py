"""`python -m minipaged` is the same as the console script `minipaged`."""

import sys

from minipaged.cli import main

if __name__ == "__main__":
    sys.exit(main())
