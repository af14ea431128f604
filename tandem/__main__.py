"""`python -m tandem`: the same as `tandem`."""

import sys

from tandem.cli.__main__ import main

sys.exit(main())
