"""Virtual time: the driver that runs a scheduler over a schedule of arrivals, and the results of such runs."""
