"""Published implementations as oracles: collected only where tools/test_env.sh put them."""

from __future__ import annotations

import importlib.util
import sys

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]
# The packaged torchvision expects CUDA; transformers takes None for absent and does without.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
