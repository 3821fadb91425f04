"""The dispatcher: the asyncio driver of the scheduler core, and what it knows of requests and gpu-lets."""
