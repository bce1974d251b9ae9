"""Memory and wire forms of routing records and sampling masks."""
