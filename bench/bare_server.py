"""SGLang's server with what a plain CPU needs and nothing else; bench/bare_engine.py starts it.

Of moerl's hooks (patches/sglang/README.md) only those that apply without CUDA are registered:
memory that is not pinned, fork in place of spawn, decode attention for the whole batch.  Without
them SGLang does not run here, or several times slower.  None of them records, checks or updates.
"""

import sys

from moerl.engine.plugin import hooks, server_process

hooks.HOOKS = tuple(hook for hook in hooks.HOOKS if hook.when is hooks.When.CPU)

if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    server_process.main()
