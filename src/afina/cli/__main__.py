"""`python -m afina.cli`, for launchers that start a module (torchrun -m)."""

import sys

from afina.cli import main

sys.exit(main())
