"""A real SGLang server, asked the same things with and without the plugin."""
