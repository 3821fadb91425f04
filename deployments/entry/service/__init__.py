"""What answers: keys, admission, deadlines, versions, figures, and the Python handle."""
