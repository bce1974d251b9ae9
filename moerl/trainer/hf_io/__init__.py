"""Hugging Face folders and live parameters: read, gathered, saved, converted; no model is built."""
