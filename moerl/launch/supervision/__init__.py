"""The processes of one run: actors, gangs and engines, watched and started again when they die."""
