"""What can be counted of the house itself: lines of code by room, and where its constants come from."""
