"""Building and running networks. They come from the catalogue, local files or a factory, and run plain, compiled,
captured or streamed."""
