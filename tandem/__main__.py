"""`python -m tandem`: the same as `tandem`."""

import sys

from tandem.cli import main

sys.exit(main())
