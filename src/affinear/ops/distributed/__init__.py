"""Tokens over many ranks: collectives with gradients, states merged over a group, and the verbs built on them."""
