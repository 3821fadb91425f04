"""The machines of a cluster: their GPUs, figures of their drivers, and the checks of `tenuto doctor`."""
