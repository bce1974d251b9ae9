"""What learns from a plan: the step and its sums, optimizer, critic, policies never trained."""
