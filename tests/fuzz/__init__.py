"""Property tests of everything in the teacher service that receives bytes from a socket.

Inputs are hypothesis strategies: valid messages, derived from their declarations, mutated ones, and arbitrary bytes.
"""
