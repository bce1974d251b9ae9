"""Episodes: turns of the policy, from a request to the rows that train it."""
