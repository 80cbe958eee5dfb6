"""`python -m thinwire`."""

import sys

from thinwire.tools.cli import main

sys.exit(main())
