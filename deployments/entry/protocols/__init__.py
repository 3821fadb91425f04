"""Exchanges to questions, and answers to exchanges: the Open Inference Protocol, OpenAI, gRPC."""
