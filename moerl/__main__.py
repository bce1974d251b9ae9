"""`python -m moerl` is `moerl`."""

from moerl.cli import main

main()
