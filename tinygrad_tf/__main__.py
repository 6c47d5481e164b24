"""`python -m tinygrad_tf …` is the command `tinygrad-tf …`."""
import sys

from .cli import main

sys.exit(main())
