"""How a request is sent: the sender protocol, and the transports that speak it."""
