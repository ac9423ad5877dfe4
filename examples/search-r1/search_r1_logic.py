"""The name by which the original guide knows this example's generation and reward; they are in
generate_with_search.py.

--custom-generate-function-path examples/search-r1/search_r1_logic.py:generate
--custom-rm-path examples/search-r1/search_r1_logic.py:exact_match
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from generate_with_search import exact_match, f1, generate  # the file beside this one

__all__ = ["exact_match", "f1", "generate"]
