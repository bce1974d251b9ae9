"""`python -m moerl` is the same as `moerl`."""

from moerl.cli import main

main()
