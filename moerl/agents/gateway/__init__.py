"""The HTTP server that agents talk to, in the forms of OpenAI and Anthropic."""
