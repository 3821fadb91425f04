"""What the thesis says of its figures, claim by claim, and how each is looked for in our results."""
