"""Hugging Face folders and live parameters: read, gather, save, convert without a model."""
