"""`python -m waitfold`."""

import sys

from waitfold.cli import main

sys.exit(main())
