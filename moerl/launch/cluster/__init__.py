"""Before a cluster run: facts about its nodes, and the commands and objects that start it."""
