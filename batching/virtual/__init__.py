"""Virtual time: the driver that runs a scheduler over a schedule of arrivals, and what such a run gives."""
