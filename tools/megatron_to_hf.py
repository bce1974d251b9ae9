#!/usr/bin/env python
"""Convert a Megatron-side sharded checkpoint back to a Hugging Face folder.

    tools/megatron_to_hf.py CHECKPOINT OUT
    python -m moerl.distributed.torchrun --nproc-per-node 4 \
        tools/megatron_to_hf.py CHECKPOINT OUT --dtype bfloat16
    tools/megatron_to_hf.py CHECKPOINT OUT --tp 1 --pp 2   (by way of another layout)

The checkpoint's manifest says its layout; any number of processes reads it.  The result opens in
transformers and SGLang.
"""

import sys

from moerl.trainer.hf_io.convert_cli import megatron_to_hf

if __name__ == "__main__":
    sys.exit(megatron_to_hf(__doc__))
