"""A gpu-let's process: the Serve replica, its worker thread, resident models and executors."""
