"""How the ranks of one job find each other, and the values that they exchange besides tensors."""
