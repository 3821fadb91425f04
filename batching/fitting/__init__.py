"""What a program that generates costs, fitted to logs of requests that were served."""
