"""`python -m tandem` is `tandem`."""

import sys

from tandem.cli.__main__ import main

sys.exit(main())
