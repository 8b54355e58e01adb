"""The endpoint for operators: its routes, who may use them, and their answers.

It is never that of clients: it has listeners, limits and a token of its own.
"""
