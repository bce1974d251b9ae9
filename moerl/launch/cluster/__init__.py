"""A cluster before a run: its nodes looked at, the commands and objects that start them."""
