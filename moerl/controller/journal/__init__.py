"""State of the controller that outlives its process."""
