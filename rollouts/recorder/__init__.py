"""An OpenAI-compatible reverse proxy that records what passes: ``manage.py record``.

``wire`` reads and mends bodies, ``proxy`` passes them on, ``writer`` stores them in a thread of its own, ``sessions``
tells which call belongs to which trajectory.
"""
