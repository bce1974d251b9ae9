#!/usr/bin/env python
"""Convert a Hugging Face folder to a Megatron-side sharded checkpoint, or reshard a checkpoint.

    tools/hf_to_megatron.py MODEL OUT --tp 4 --pp 2 --ep 8
    python -m moerl.distributed.torchrun --nproc-per-node 4 \
        tools/hf_to_megatron.py MODEL OUT --ep 8 --dtype bfloat16
    tools/hf_to_megatron.py CHECKPOINT OUT --tp 2          (another layout of the same weights)

Run plainly, one process visits the ranks one after another; under torchrun the ranks are spread
over the processes.  No GPU and no process group is used.
"""

import sys

from moerl.trainer.hf_io.convert_cli import hf_to_megatron

if __name__ == "__main__":
    sys.exit(hf_to_megatron(__doc__))
