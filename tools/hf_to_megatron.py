#!/usr/bin/env python
"""Convert a Hugging Face folder to a checkpoint in the form of a run's own (`torch_dist`).

    tools/hf_to_megatron.py MODEL OUT
    python -m moerl.distributed.torchrun --nproc-per-node 4 \
        tools/hf_to_megatron.py MODEL OUT --dtype bfloat16

`moerl train RECIPE checkpoint.start=OUT` starts from it, on any layout; so does Megatron-LM, after
`--layer-spec te`.  Under torchrun the files are spread over the processes.  No GPU and no process
group is used.
"""

import sys

from moerl.trainer.checkpoints.convert_cli import hf_to_megatron

if __name__ == "__main__":
    sys.exit(hf_to_megatron(__doc__))
