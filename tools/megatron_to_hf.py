#!/usr/bin/env python
"""Convert a Megatron checkpoint to a Hugging Face folder.

    tools/megatron_to_hf.py runs/NAME OUT                       (its newest checkpoint)
    tools/megatron_to_hf.py runs/NAME/checkpoints/step-000040 OUT
    tools/megatron_to_hf.py MEGATRON_LM_FOLDER OUT --model MODEL
    python -m moerl.distributed.torchrun --nproc-per-node 4 \
        tools/megatron_to_hf.py runs/NAME OUT --dtype bfloat16

The run may be running, ended or killed; its layout does not matter, and any number of processes
reads it.  The result opens in transformers and SGLang and equals the run's own hf/ of that step.
"""

import sys

from moerl.trainer.checkpoints.convert_cli import megatron_to_hf

if __name__ == "__main__":
    sys.exit(megatron_to_hf(__doc__))
