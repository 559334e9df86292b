"""The GPU check: one command for everything that can be checked and measured on a real GPU.

See docs/how-to/gpu.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports of the other benchmarks, which are scripts
