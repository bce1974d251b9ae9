"""The processes of one run: actors, trainers and engines, watched and restarted when they die."""
