"""A model over the microbatches of a plan: schedules, router losses, what forward passes tell."""
