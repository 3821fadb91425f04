"""The MILP policies of Elvinger's thesis: patterns of replicas on a GPU, chosen by an integer program."""
