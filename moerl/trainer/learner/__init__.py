"""Learning from a plan: the step and its sums, optimizer, critic, reference models."""
