#!/usr/bin/env python
"""Merge an adapter into its model, or find out what a merged model was made of.

    tools/lora_merge.py runs/NAME OUT                                 (its last adapter)
    tools/lora_merge.py runs/NAME OUT --adapter runs/NAME/adapter/0.7  (of a kept version)
    tools/lora_merge.py runs/NAME OUT --sglang                        (not merged, for SGLang)
    tools/lora_merge.py MODEL OUT --adapter FOLDER --dtype bf16        (of peft, from elsewhere)
    tools/lora_merge.py MERGED OUT --unmerge --base MODEL              (its adapter, proven)

The result opens in transformers and SGLang.  For a run its weights are those that the engines
served, bit for bit; the model without the adapter is the folder that model.path of the run names.
A merged folder keeps its adapter and the fingerprint of that model: rounded weights alone give
neither back.  --unmerge finds both, merges them once more and compares every bit.
"""

import sys

from moerl.trainer.hf_io.merge_adapter import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
