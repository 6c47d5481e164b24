"""Prints the N-th `sh` code block of README.md: CI runs what a user would paste."""
import re
import sys
from pathlib import Path

blocks = re.findall(r"^```sh\n(.*?)^```", Path("README.md").read_text(encoding="utf-8"), flags=re.M | re.S)
print(blocks[int(sys.argv[1]) - 1], end="")
