"""Streams rollouts out of trainers, one module for each framework. The standard library only; see docs/adapters/."""
