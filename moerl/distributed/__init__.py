"""How the ranks of one job find each other, and what they exchange besides tensors."""
