"""The dispatcher: the asyncio driver of the scheduler core. It keeps the open requests and the gpu-lets'
connections."""
