#!/usr/bin/env python
"""Merge an adapter of a run into its model.

    tools/lora_merge.py runs/NAME OUT                                 (its last adapter)
    tools/lora_merge.py runs/NAME OUT --adapter runs/NAME/adapter/0.7  (of a kept version)
    tools/lora_merge.py runs/NAME OUT --sglang                        (not merged, for SGLang)

The result opens in transformers and SGLang.  Its weights are those that the engines served, bit for
bit; the model without the adapter is the folder that model.path of the run names.
"""

import sys

from moerl.trainer.hf_io.merge_adapter import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
