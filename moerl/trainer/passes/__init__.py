"""A model over the microbatches of a plan: schedules, router losses, gradient-free forwards."""
