"""How a network is built and run: from the catalogue, local files or a factory; plain, compiled, captured or
streamed."""
