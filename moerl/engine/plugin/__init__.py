"""Everything of ours that runs inside SGLang's processes."""
