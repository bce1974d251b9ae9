"""Hugging Face folders and live parameters: read and save."""
