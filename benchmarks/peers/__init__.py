"""Other programs on the same work, side by side with fedsim: `python -m benchmarks.peers`.

`workloads.py` lists the experiments, `export.py` writes the work of an experiment to a file, and `rivals.py` lists the
programs with their exact versions. A program is one file here that imports PyTorch, NumPy, its simulator and `work.py`,
but not fedsim. `python -m benchmarks.peers.NAME WORK RESULT` reads the work, does it with the simulator's own machinery
in its fastest documented configuration, and saves a `Result`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for imports of the other benchmarks, which are scripts
