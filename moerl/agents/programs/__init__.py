"""External programs that play episodes over the gateway."""
