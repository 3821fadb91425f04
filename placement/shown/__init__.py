"""How a plan is shown to people: as a table and as a picture."""
