"""A fleet of cells: what each says of itself, and the traffic between them in the words of the proxies in front."""
