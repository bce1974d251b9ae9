"""The processes of one run: actors, trainers and engines, watched and started again when they
die.
"""
