"""Weight sync of low-rank adapters: factors travel, engines merge."""
