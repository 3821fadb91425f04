"""The statements of the thesis about its figures, claim by claim, and how each is looked for in our results."""
