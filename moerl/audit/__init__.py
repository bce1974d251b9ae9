"""How far trainer and engine differ, and why: the command, its scoring ranks, dumps, the page."""
