"""`moerl` in the process of a test, which has imported most of it already."""

from __future__ import annotations

import contextlib
import io
import sys
from subprocess import CompletedProcess
from unittest import mock

from moerl import cli


def moerl(*words: str) -> CompletedProcess[str]:
    """Run `moerl WORDS` here; the exit status and what it printed, as `subprocess.run` has them."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["moerl", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return CompletedProcess(list(words), code, out.getvalue(), err.getvalue())
