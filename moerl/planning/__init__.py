"""What a run would start, move and cost, without starting it."""
